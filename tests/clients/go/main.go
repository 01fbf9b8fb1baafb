// franz-go against a broker: franz-go-client '{"brokers": "...", "topics": {...}, "prefix": "..."}'
// Prints what it saw as one line of JSON; see test_go_and_javascript_clients.py for the steps.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

type job struct {
	Brokers string            `json:"brokers"`
	Topics  map[string]string `json:"topics"`
	Prefix  string            `json:"prefix"`
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func (j job) client(options ...kgo.Opt) *kgo.Client {
	client, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(j.Brokers), kgo.ClientID("franz-go")}, options...)...)
	check(err)
	return client
}

func numbers(topic string, first, end int) []*kgo.Record {
	records := []*kgo.Record{}
	for number := first; number < end; number++ {
		records = append(records, &kgo.Record{Topic: topic, Value: []byte(fmt.Sprintf("value-%d", number))})
	}
	return records
}

func (j job) produceIdempotently(ctx context.Context) {
	client := j.client() // idempotent unless it is told otherwise
	defer client.Close()
	for first := 0; first < 100; first += 20 {
		check(client.ProduceSync(ctx, numbers(j.Topics["idempotent"], first, first+20)...).FirstErr())
	}
}

func (j job) runTransactions(ctx context.Context) {
	client := j.client(kgo.TransactionalID(j.Prefix + "-id"))
	defer client.Close()
	for _, first := range []int{0, 5, 10} {
		check(client.BeginTransaction())
		for _, topic := range []string{"one", "two"} {
			check(client.ProduceSync(ctx, numbers(j.Topics[topic], first, first+5)...).FirstErr())
		}
		check(client.EndTransaction(ctx, kgo.TransactionEndTry(first != 5)))
	}
}

// Reads committed records from the beginning until there are so many, and a little longer.
func (j job) readCommitted(ctx context.Context, topic, group string, count int) []string {
	client := j.client(
		kgo.ConsumeTopics(topic), kgo.ConsumerGroup(group), kgo.DisableAutoCommit(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
	)
	defer client.Close()
	values := []string{}
	read := func(ctx context.Context) {
		client.PollFetches(ctx).EachRecord(func(r *kgo.Record) { values = append(values, string(r.Value)) })
	}
	for len(values) < count && ctx.Err() == nil {
		read(ctx)
	}
	more, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	read(more)
	return values
}

// Each record goes on, and its offset with it, in one transaction.
func (j job) transform(ctx context.Context, count int) {
	session, err := kgo.NewGroupTransactSession(
		kgo.SeedBrokers(j.Brokers), kgo.TransactionalID(j.Prefix+"-transform"),
		kgo.ConsumeTopics(j.Topics["idempotent"]), kgo.ConsumerGroup(j.Prefix+"-transform"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.RequireStableFetchOffsets(),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
	)
	check(err)
	defer session.Close()
	for done := 0; done < count && ctx.Err() == nil; {
		fetches := session.PollFetches(ctx)
		check(session.Begin())
		fetches.EachRecord(func(r *kgo.Record) {
			value := []byte(strings.ToUpper(string(r.Value)))
			session.Produce(ctx, &kgo.Record{Topic: j.Topics["transformed"], Value: value}, nil)
		})
		committed, err := session.End(ctx, kgo.TryCommit)
		check(err)
		if committed {
			done += fetches.NumRecords()
		}
	}
}

type member struct {
	lock       sync.Mutex
	partitions map[int32]bool
	client     *kgo.Client
}

func (m *member) owned() []int32 {
	m.lock.Lock()
	defer m.lock.Unlock()
	owned := []int32{}
	for partition := range m.partitions {
		owned = append(owned, partition)
	}
	sort.Slice(owned, func(i, k int) bool { return owned[i] < owned[k] })
	return owned
}

func (j job) join(ctx context.Context) *member {
	m := &member{partitions: map[int32]bool{}}
	change := func(has bool) func(context.Context, *kgo.Client, map[string][]int32) {
		return func(_ context.Context, _ *kgo.Client, changed map[string][]int32) {
			m.lock.Lock()
			defer m.lock.Unlock()
			for _, partition := range changed[j.Topics["shared"]] {
				if has {
					m.partitions[partition] = true
				} else {
					delete(m.partitions, partition)
				}
			}
		}
	}
	m.client = j.client(
		kgo.ConsumeTopics(j.Topics["shared"]), kgo.ConsumerGroup(j.Prefix+"-group"), kgo.HeartbeatInterval(300*time.Millisecond),
		kgo.OnPartitionsAssigned(change(true)), kgo.OnPartitionsRevoked(change(false)), kgo.OnPartitionsLost(change(false)),
	)
	go func() {
		for ctx.Err() == nil && !m.client.PollFetches(ctx).IsClientClosed() {
		}
	}()
	return m
}

func (j job) rebalance(ctx context.Context) map[string][]int32 {
	await := func(m *member, count int) []int32 {
		for len(m.owned()) != count && ctx.Err() == nil {
			time.Sleep(50 * time.Millisecond)
		}
		return m.owned()
	}
	a := j.join(ctx)
	alone := await(a, 4)
	b := j.join(ctx)
	found := map[string][]int32{"alone": alone, "b": await(b, 2), "a": await(a, 2)}
	b.client.Close()
	found["again"] = await(a, 4)
	a.client.Close()
	return found
}

func main() {
	var j job
	check(json.Unmarshal([]byte(os.Args[1]), &j))
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	j.produceIdempotently(ctx)
	j.runTransactions(ctx)
	committed := j.readCommitted(ctx, j.Topics["one"], j.Prefix+"-reader", 10)
	j.transform(ctx, 100)
	found := map[string]any{"committed": committed, "group": j.rebalance(ctx)}
	text, err := json.Marshal(found)
	check(err)
	fmt.Println(string(text))
}
