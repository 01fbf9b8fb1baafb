// @platformatic/kafka against a broker: node platformatic_client.js '{"brokers": "...", "topics": {...}, "prefix": "..."}'
// Prints what it saw as one line of JSON; see test_go_and_javascript_clients.py for the steps.
import { Consumer, Producer, stringDeserializers, stringSerializers } from '@platformatic/kafka'

const { brokers, topics, prefix } = JSON.parse(process.argv[2])
const shared = { clientId: 'platformatic', bootstrapBrokers: [brokers] }
const numbers = (topic, first, end) => Array.from({ length: end - first }, (_, i) => ({ topic, value: `value-${first + i}` }))
const writer = options => new Producer({ ...shared, serializers: stringSerializers, idempotent: true, ...options })
const reader = groupId => new Consumer({ ...shared, groupId, deserializers: stringDeserializers, heartbeatInterval: 300 })

async function produceIdempotently () {
  const producer = writer({})
  for (let first = 0; first < 100; first += 20) {
    await producer.send({ messages: numbers(topics.idempotent, first, first + 20), acks: -1 })
  }
  await producer.close()
}

async function runTransactions () {
  const producer = writer({ transactionalId: `${prefix}-id` })
  for (const [first, end] of [[0, 5], [5, 10], [10, 15]]) {
    const transaction = await producer.beginTransaction()
    for (const topic of [topics.one, topics.two]) await transaction.send({ messages: numbers(topic, first, end) })
    await (first === 5 ? transaction.abort() : transaction.commit())
  }
  await producer.close()
}

// Reads committed records from the beginning until there are so many, and a little longer.
async function readCommitted (topic, group, count) {
  const consumer = reader(group)
  const stream = await consumer.consume({ topics: [topic], mode: 'earliest', isolationLevel: 1, autocommit: false })
  const values = []
  await new Promise((resolve, reject) => {
    stream.on('error', reject)
    stream.on('data', message => {
      values.push(message.value)
      if (values.length === count) setTimeout(resolve, 500)
    })
  })
  await consumer.close(true)
  return values
}

// Each record goes on, and its offset with it, in one transaction.
async function transform (count) {
  const consumer = reader(`${prefix}-transform`)
  const producer = writer({ transactionalId: `${prefix}-transform` })
  const stream = await consumer.consume({ topics: [topics.idempotent], mode: 'earliest', autocommit: false })
  const transaction = await producer.beginTransaction()
  await transaction.addConsumer(consumer)
  let done = 0
  for await (const message of stream) {
    await transaction.send({ messages: [{ topic: topics.transformed, value: message.value.toUpperCase() }] })
    await transaction.addOffset(message)
    if (++done === count) break
  }
  await transaction.commit()
  await consumer.close(true)
  await producer.close()
}

async function member (assigned) {
  const consumer = reader(`${prefix}-group`)
  const tell = () => assigned((consumer.assignments ?? []).find(each => each.topic === topics.shared)?.partitions ?? [])
  consumer.on('consumer:group:join', tell)
  consumer.on('consumer:group:rebalance', tell)
  const stream = await consumer.consume({ topics: [topics.shared], mode: 'earliest', autocommit: false })
  stream.on('data', () => {})
  tell()
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
  await b.close(true)
  await until(() => seen.a.length === 4)
  await a.close(true)
  return { alone, ...both, again: seen.a }
}

await produceIdempotently()
await runTransactions()
const committed = await readCommitted(topics.one, `${prefix}-reader`, 10)
await transform(100)
console.log(JSON.stringify({ committed, group: await rebalance() }))
process.exit(0)
