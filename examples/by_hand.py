"""Consume, transform, produce by hand: what `semel.process` does, with every error where it belongs.

python examples/by_hand.py                    # on a broker of its own
python examples/by_hand.py localhost:9092     # on yours: semel's, or Apache Kafka
semel consume hand.squares --exit             # the output; run it again: nothing is squared twice
"""

import sys

import semel

COUNT = 100


def one_transaction(consumer: semel.Consumer, producer: semel.Producer, records: list) -> int:
    """Output and offsets commit together; how many records are done by that."""
    try:
        producer.begin_transaction()
        for record in records:
            producer.send("hand.squares", b"%d" % int(record.value) ** 2, record.key)
        producer.send_offsets_to_transaction(consumer.consumed(), consumer.group_metadata())
        producer.commit_transaction()
    except semel.FencedError:
        raise  # another instance has this transactional id, and goes on: stop
    except semel.CommitUncertainError:
        producer.commit_transaction()  # the same commit again: it says how it ended, and commits once
    except (semel.AbortableError, semel.RetriableError):
        producer.abort_transaction()
        consumer.seek_to_committed(*consumer.assignment())  # read again what was not committed
        return 0
    return len(records)  # all other errors are fatal: the program ends, and the next owner of the id aborts


def main(brokers: str) -> None:
    with semel.Admin(bootstrap_servers=brokers) as admin:
        admin.create_topic("hand.numbers", 2, if_not_exists=True)
        admin.create_topic("hand.squares", 2, if_not_exists=True)
    with semel.Producer(bootstrap_servers=brokers) as producer:
        for number in range(COUNT):
            producer.send("hand.numbers", b"%d" % number, b"%d" % (number % 7))
    options = {"group_id": "by-hand", "auto_offset_reset": "earliest", "enable_auto_commit": False}  # True is refused
    with (
        semel.Consumer(bootstrap_servers=brokers, **options) as consumer,
        semel.Producer(bootstrap_servers=brokers, transactional_id="by-hand") as producer,
    ):
        producer.init_transactions()
        consumer.subscribe(["hand.numbers"])
        done = 0
        while done < COUNT:
            if records := consumer.poll(500):
                done += one_transaction(consumer, producer, records)
    print(f"{done} numbers squared")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with semel.Broker() as broker:
            main(broker.bootstrap)
