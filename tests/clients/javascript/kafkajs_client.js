// KafkaJS against a broker: node kafkajs_client.js '{"brokers": "...", "topics": {...}, "prefix": "..."}'
// Prints what it saw as one line of JSON; see test_go_and_javascript_clients.py for the steps.
import { Kafka, logLevel } from 'kafkajs'

const { brokers, topics, prefix } = JSON.parse(process.argv[2])
const kafka = new Kafka({ clientId: 'kafkajs', brokers: [brokers], logLevel: logLevel.NOTHING })
const numbers = (first, end) => Array.from({ length: end - first }, (_, i) => ({ value: `value-${first + i}` }))

async function produceIdempotently () {
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 })
  await producer.connect()
  for (let first = 0; first < 100; first += 20) {
    await producer.send({ topic: topics.idempotent, messages: numbers(first, first + 20) })
  }
  await producer.disconnect()
}

async function runTransactions () {
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1, transactionalId: `${prefix}-id` })
  await producer.connect()
  for (const [first, end] of [[0, 5], [5, 10], [10, 15]]) {
    const transaction = await producer.transaction()
    for (const topic of [topics.one, topics.two]) await transaction.send({ topic, messages: numbers(first, end) })
    await (first === 5 ? transaction.abort() : transaction.commit())
  }
  await producer.disconnect()
}

// Reads committed records from the beginning until there are so many, and a little longer.
async function readCommitted (topic, group, count) {
  const consumer = kafka.consumer({ groupId: group, readUncommitted: false })
  await consumer.connect()
  await consumer.subscribe({ topic, fromBeginning: true })
  const values = []
  await new Promise((resolve, reject) => {
    consumer.run({
      eachMessage: async ({ message }) => {
        values.push(message.value.toString())
        if (values.length === count) setTimeout(resolve, 500)
      }
    }).catch(reject)
  })
  await consumer.disconnect()
  return values
}

// Each record goes on, and its offset with it, in one transaction.
async function transform (count) {
  const consumer = kafka.consumer({ groupId: `${prefix}-transform` })
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1, transactionalId: `${prefix}-transform` })
  await Promise.all([consumer.connect(), producer.connect()])
  await consumer.subscribe({ topic: topics.idempotent, fromBeginning: true })
  let done = 0
  await new Promise((resolve, reject) => {
    consumer.run({
      autoCommit: false,
      eachBatchAutoResolve: false,
      eachBatch: async ({ batch, resolveOffset }) => {
        const transaction = await producer.transaction()
        const messages = batch.messages.map(message => ({ value: message.value.toString().toUpperCase() }))
        await transaction.send({ topic: topics.transformed, messages })
        const offset = (BigInt(batch.lastOffset()) + 1n).toString()
        await transaction.sendOffsets({
          consumerGroupId: `${prefix}-transform`,
          topics: [{ topic: batch.topic, partitions: [{ partition: batch.partition, offset }] }]
        })
        await transaction.commit()
        resolveOffset(batch.lastOffset())
        done += messages.length
        if (done >= count) resolve()
      }
    }).catch(reject)
  })
  await Promise.all([consumer.disconnect(), producer.disconnect()])
}

async function member (assigned) {
  const consumer = kafka.consumer({ groupId: `${prefix}-group`, heartbeatInterval: 300, rebalanceTimeout: 10_000 })
  consumer.on(consumer.events.GROUP_JOIN, ({ payload }) => assigned(payload.memberAssignment[topics.shared] ?? []))
  await consumer.connect()
  await consumer.subscribe({ topic: topics.shared, fromBeginning: true })
  consumer.run({ eachMessage: async () => {} })
  return consumer
}

async function rebalance () {
  const seen = { a: [], b: [] }
  const until = async condition => { while (!condition()) await new Promise(resolve => setTimeout(resolve, 50)) }
  const a = await member(partitions => { seen.a = partitions })
  await until(() => seen.a.length === 4)
  const alone = seen.a
  const b = await member(partitions => { seen.b = partitions })
  await until(() => seen.a.length === 2 && seen.b.length === 2)
  const both = { a: seen.a, b: seen.b }
  await b.disconnect()
  await until(() => seen.a.length === 4)
  await a.disconnect()
  return { alone, ...both, again: seen.a }
}

await produceIdempotently()
await runTransactions()
const committed = await readCommitted(topics.one, `${prefix}-reader`, 10)
await transform(100)
console.log(JSON.stringify({ committed, group: await rebalance() }))
process.exit(0)
