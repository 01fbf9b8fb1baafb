"""Tellers withdraw from one account at the same time, and it is never overdrawn: appends with an expected version.

    python examples/entities.py localhost:9092

Run a broker with `semel broker`. Each teller reads the account, decides, and appends; who was too late decides anew.
"""

from __future__ import annotations

import sys
import threading

import semel

ACCOUNT, MONEY, TELLERS = "acc-7", 100, 4


def book(balance: int | None, event: bytes) -> int:
    return (balance or 0) + int(event)


def withdraw(accounts: semel.Entities, taken: list[int]) -> None:
    with accounts.view(fold=book) as view:
        token = None
        while (account := view.read(ACCOUNT, after=token)).value >= 10:
            try:
                token = accounts.append(ACCOUNT, account.version, [b"-10"]).token  # the next read has seen it
                taken.append(10)
            except semel.ConflictError as conflict:
                token = f"{conflict.version}@{ACCOUNT}"  # somebody was faster: read what they did


def main(brokers: str) -> None:
    accounts = semel.Entities("accounts", bootstrap_servers=brokers, source="tellers")
    accounts.create(partitions=2)
    owner = accounts.owner(fold=book)  # in production: a process of its own
    thread = threading.Thread(target=owner.run)
    thread.start()
    try:
        with accounts.view(fold=book) as view:
            account = view.read(ACCOUNT)
            accounts.append(ACCOUNT, account.version, [b"%d" % MONEY])
            taken: list[int] = []
            tellers = [threading.Thread(target=withdraw, args=[accounts, taken]) for _ in range(TELLERS)]
            for teller in tellers:
                teller.start()
            for teller in tellers:
                teller.join()
            view.refresh()
            print(f"{sum(taken)} were withdrawn, {view.read(ACCOUNT).value} are left")
    finally:
        owner.stop()
        thread.join()
        accounts.close()


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 2 else sys.exit(__doc__)
