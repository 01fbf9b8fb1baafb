// The page. Plain DOM: every text goes in as text, never as markup, so what records and names hold cannot become code.
const VIEWS = [
  ["", "Overview"], ["topics", "Topics"], ["transactions", "Transactions"], ["producers", "Producers"],
  ["groups", "Groups"], ["applications", "Spark"], ["doctor", "Doctor"],
];
const SVG = "http://www.w3.org/2000/svg";
const mayChange = document.body.dataset.allowChanges === "1";
const main = document.getElementById("main");
const number = new Intl.NumberFormat("en");

// --- making elements ---
function h(tag, props, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    node.append(child instanceof Node ? child : document.createTextNode(visible(String(child), tag === "pre")));
  }
  return node;
}

// Characters that show nothing, or turn the reading direction, as an escape: a name must not look like another one.
const HIDDEN = /[\p{Cc}\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/gu;
const ESCAPES = { "\n": "\\n", "\t": "\\t", "\r": "\\r" };
function visible(text, hasLines) {
  return text.replace(HIDDEN, (each) => (hasLines && each in ESCAPES ? each : ESCAPES[each] || `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`));
}

// Makes `old` look like `fresh` and keeps what did not change: focus, scroll positions and selections stay.
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) { old.replaceWith(fresh); return; }
  if (old.nodeType === Node.TEXT_NODE) { if (old.data !== fresh.data) old.data = fresh.data; return; }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of [...fresh.attributes]) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  old.onclick = fresh.onclick; old.oninput = fresh.oninput; old.onchange = fresh.onchange;
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((node, at) => { if (at < before.length) morph(before[at], node); else old.append(node); });
  before.slice(after.length).forEach((node) => node.remove());
}

// --- texts ---
const count = (value) => (value === null || value === undefined ? "–" : number.format(value));
const some = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
const clock = (ms) => {
  if (!(ms >= 0)) return "";
  const at = new Date(ms), pad = (n, size = 2) => String(n).padStart(size, "0");
  return `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}.${pad(at.getMilliseconds(), 3)}`;
};
const day = (ms) => (ms >= 0 ? `${new Date(ms).toLocaleDateString("en-CA")} ${clock(ms)}` : "–");
function lasting(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 120000) return `${(ms / 1000).toFixed(1)} s`;
  return ms < 7200000 ? `${Math.round(ms / 60000)} min` : `${(ms / 3600000).toFixed(1)} h`;
}
const size = (bytes) => (bytes < 1024 ? `${bytes} B` : bytes < 1048576 ? `${(bytes / 1024).toFixed(1)} KB` : `${(bytes / 1048576).toFixed(1)} MB`);
const to = (view, query = {}) => {
  const chosen = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
  return `#/${view}${chosen.length ? `?${new URLSearchParams(chosen.map(([k, v]) => [k, v === true ? "1" : v]))}` : ""}`;
};
const chip = (text, kind) => h("span", { class: `chip ${(kind || text).split(" ")[0]}` }, text);
const transactionLink = (id) => h("a", { href: to("transaction", { id }) }, id);

// --- asking ---
const RESPONSE_WITHIN_MS = 60_000;  // the server gives up on its cluster before; a network that is gone says nothing
async function ask(path, query = {}) {
  const chosen = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const response = await fetch(`api/${path}?${chosen}`, { credentials: "same-origin", signal: AbortSignal.timeout(RESPONSE_WITHIN_MS) })
    .catch((error) => { throw error.name === "TimeoutError" ? new Error("the page's server did not respond in time") : error; });
  const body = await response.json().catch(() => ({ error: `the page's server responded ${response.status}` }));
  if (!response.ok) throw Object.assign(new Error(body.error || response.statusText), { status: response.status });
  return body;
}
async function change(path, body) {
  const response = await fetch(`api/${path}`, { method: "POST", credentials: "same-origin", headers: { "Content-Type": "application/json", "X-Semel": "1" }, body: JSON.stringify(body) });
  const said = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) throw new Error(said.error || response.statusText);
  return said;
}

// --- pieces ---
function table(caption, heads, rows, empty) {
  if (!rows.length) return h("div", { class: "panel" }, h("div", { class: "empty" }, empty));
  return h("div", { class: "panel scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: head.startsWith("#") ? "num" : null }, head.replace(/^#/, ""))))),
      h("tbody", {}, rows)));
}
function heading(title, lead) { return [h("h1", {}, title), lead ? h("p", { class: "lead" }, lead) : null]; }
function cardOf(value, label, href, kind) {
  return h(href ? "a" : "div", { class: `card ${kind || ""}`, href }, h("b", {}, value), h("span", {}, label));
}
function barOf(bar, name) {
  const span = Math.max(bar.end - bar.start, 1), gap = bar.end - bar.stable;
  const wide = gap > 0 ? Math.max((gap / span) * 1000, 14) : 0, done = bar.end > bar.start ? 1000 - wide : 0;
  const holder = bar.held_by[0];
  const who = holder ? holder.transactional_id || `producer ${holder.producer_id}, which no coordinator knows` : "a transaction that just ends";
  const said = `${bar.topic}-${bar.partition}: start ${count(bar.start)}, last stable offset ${count(bar.stable)}, end ${count(bar.end)}` + (gap > 0 ? `; ${count(gap)} held back by ${who}` : "");
  return h("div", { class: "bar" },
    h("a", { class: "who", href: to("records", { topic: bar.topic, partition: String(bar.partition) }), "aria-label": `Records of ${bar.topic}-${bar.partition}` }, name || `p${bar.partition}`),
    h("svg:svg", { viewBox: "0 0 1000 13", preserveAspectRatio: "none", role: "img", "aria-label": said },
      h("svg:rect", { class: "track", width: 1000, height: 13, rx: 3 }),
      h("svg:rect", { class: "done", width: done, height: 13, rx: 3 }),
      h("svg:rect", { class: "gap-fill", x: done, width: wide, height: 13, rx: 3 })),
    h("div", { class: "names" }, `${count(bar.start)} · ${count(bar.stable)} · ${count(bar.end)}`,
      gap > 0 ? [" ", h("span", { class: "gap" }, `${count(gap)} held back by `, holder && holder.transactional_id ? transactionLink(holder.transactional_id) : who)] : null,
      gap > 0 && holder && !holder.transactional_id && mayChange ? [" ", h("button", { type: "button", class: "danger", onclick: () => confirmHanging(bar, holder) }, "End it …")] : null));
}
const bars = (list) => h("div", { class: "bars" }, list.map((bar) => barOf(bar)));
const legend = () => h("p", { class: "legend" }, h("span", {}, h("i", { class: "l-done" }), "start to last stable offset: committed or aborted"), h("span", {}, h("i", { class: "l-gap" }), "beyond it: held back by an open transaction"), h("span", {}, "numbers: start · last stable offset · end"));
function line(points, kind, label) {
  if (points.length < 2) return h("span", { class: "quiet small" }, "–");
  const high = Math.max(...points.map((p) => p[1]), 1), first = points[0][0], long = Math.max(points[points.length - 1][0] - first, 1);
  const places = points.map(([at, value]) => `${(((at - first) / long) * 1000).toFixed(1)},${(98 - (value / high) * 94).toFixed(1)}`);
  return h("svg:svg", { class: kind, viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": `${label}: now ${count(points[points.length - 1][1])}, at most ${count(high)} in ${lasting(long)}` },
    h("svg:polygon", { class: "area", points: `0,100 ${places.join(" ")} 1000,100` }), h("svg:polyline", { class: "spark", points: places.join(" ") }));
}
function bytes(data, where, part) {
  if (data === null) return h("span", { class: "quiet small" }, "null");
  const query = new URLSearchParams({ ...where, part });
  return [h("pre", { class: `bytes ${data.is_text ? "" : "hex"}` }, data.text + (data.is_cut ? " …" : "")),
    data.is_cut || !data.is_text ? h("div", { class: "small quiet" }, `${size(data.size)}${data.is_text ? "" : ", not text"} `, part ? h("a", { href: `api/bytes?${query}`, download: "" }, "save") : null) : null];
}
function transactionRows(rows) {
  return rows.map((row) => h("tr", {},
    h("td", { class: "id" }, transactionLink(row.id)), h("td", {}, chip(row.state), row.is_two_phase ? [" ", chip("two-phase", "held")] : null),
    h("td", { class: "num" }, row.age_ms === undefined ? "–" : lasting(row.age_ms)), h("td", { class: "num" }, row.timeout_ms ? lasting(row.timeout_ms) : "–"),
    h("td", { class: "num mono" }, row.epoch === undefined ? row.producer_id : `${row.producer_id} / ${row.epoch}`),
    h("td", { class: "wide small" }, row.partitions ? row.partitions.slice(0, 4).join(", ") + (row.partition_count > 4 ? ` and ${row.partition_count - 4} more` : "") : "")));
}
const TRANSACTION_HEADS = ["Transactional id", "State", "#Open for", "#Timeout", "#Producer / epoch", "Partitions"];
const search = (query, view, label) => h("input", { type: "search", id: "search", placeholder: label, "aria-label": label, value: query.q || "", oninput: (event) => later(() => go(view, { ...query, q: event.target.value, page: "" })) });

// --- views: what each reads, and what it shows ---
const views = {
  "": async () => {
    const seen = await ask("overview"), oldest = seen.open[0];
    return [heading("Overview", `Cluster ${seen.cluster_id || "without a name"}, ${seen.brokers.join(", ")}; ${seen.is_semel ? "semel's broker" : "Kafka"}, transactions of generation ${seen.features["transaction.version"] >= 2 ? 2 : 1}.`),
      h("div", { class: "cards" },
        cardOf(count(seen.topics), "topics", to("topics")), cardOf(count(seen.partitions), "partitions, internal ones too", to("topics")),
        cardOf(count(seen.open_count), "transactions under way", to("transactions"), seen.open_count ? "warn" : ""),
        cardOf(oldest && oldest.age_ms !== null ? lasting(oldest.age_ms) : "–", "open for longest", oldest ? to("transaction", { id: oldest.id }) : to("transactions"), oldest && oldest.age_ms > 60000 ? "bad" : ""),
        cardOf(count(seen.transactional_ids), "transactional ids", to("transactions")),
        cardOf(count(Object.values(seen.groups).reduce((a, b) => a + b, 0)), `groups${Object.keys(seen.groups).length ? ": " : ""}${Object.entries(seen.groups).map(([k, v]) => `${v} ${k}`).join(", ")}`, to("groups")),
        cardOf(known.findings === undefined ? "…" : count(known.findings), "findings of the doctor", to("doctor"), known.findings ? "bad" : "")),
      h("h2", {}, "Transactions under way, the oldest first"), table("Transactions under way", TRANSACTION_HEADS, transactionRows(seen.open), "No transaction is open: nothing holds back readers of committed data.")];
  },
  topics: async (query) => {
    const seen = await ask("topics", query), page = seen.page;
    return [heading("Topics", some(seen.total, "topic")), h("div", { class: "filters" }, search(query, "topics", "Search topics"),
      h("label", { class: "check" }, h("input", { type: "checkbox", checked: query.held === "1", onchange: (event) => go("topics", { ...query, held: event.target.checked, page: "" }) }), "in an open transaction"),
      h("label", { class: "check" }, h("input", { type: "checkbox", checked: query.internal === "1", onchange: (event) => go("topics", { ...query, internal: event.target.checked, page: "" }) }), "internal topics")), legend(),
      seen.topics.length ? seen.topics.map((topic) => h("section", { class: "panel", "aria-label": `Topic ${topic.name}` }, h("div", { class: "topic-head" }, h("a", { href: to("topic", { name: topic.name }) }, topic.name), h("span", { class: "quiet small" }, some(topic.partitions, "partition"))), bars(topic.bars))) : h("div", { class: "panel" }, h("div", { class: "empty" }, "There is no such topic.")),
      seen.pages > 1 ? h("div", { class: "filters" }, h("button", { type: "button", disabled: page === 0, onclick: () => go("topics", { ...query, page: page - 1 }) }, "Previous"), h("span", {}, `page ${page + 1} of ${seen.pages}`), h("button", { type: "button", disabled: page + 1 >= seen.pages, onclick: () => go("topics", { ...query, page: page + 1 }) }, "Next")) : null];
  },
  topic: async (query) => {
    const seen = await ask("topic", { name: query.name });
    return [heading(seen.name, some(seen.partitions, "partition") + (seen.is_internal ? ", internal" : "")), legend(), h("div", { class: "panel" }, bars(seen.bars)), seen.left_out ? h("p", { class: "quiet" }, `${seen.left_out} more partitions are not shown`) : null,
      h("h2", {}, "Settings that are not the default"), table("Settings", ["Name", "Value"], seen.settings.map((each) => h("tr", {}, h("td", { class: "mono" }, each.name), h("td", { class: "mono wide" }, each.value))), "All settings are the broker's defaults.")];
  },
  records: async (query) => {
    const seen = await ask("records", query), place = { topic: query.topic, partition: query.partition };
    const step = (offset) => go("records", { ...query, offset });
    const states = { committed: "committed", aborted: "aborted", open: "open", "held back": "held" };
    return [heading(`${query.topic}-${query.partition}`, "Records as they are in the log, with what became of each."), h("div", { class: "panel" }, h("div", { class: "bars" }, barOf(seen))),
      h("div", { class: "filters" }, h("button", { type: "button", onclick: () => step(String(seen.start)) }, "Start"), h("button", { type: "button", disabled: seen.from <= seen.start, onclick: () => step(String(Math.max(seen.start, seen.from - 50))) }, "Before"),
        h("button", { type: "button", disabled: seen.next >= seen.end, onclick: () => step(String(seen.next)) }, "Next"), h("button", { type: "button", onclick: () => step("end") }, "End"),
        h("label", { class: "check" }, "Offset", h("input", { type: "number", min: 0, value: String(seen.from), "aria-label": "Offset", onchange: (event) => step(event.target.value || "0") })),
        h("label", { class: "check" }, h("input", { type: "checkbox", checked: query.markers === "1", onchange: (event) => go("records", { ...query, markers: event.target.checked }) }), "control records"),
        seen.left_out ? h("span", { class: "quiet small" }, `${some(seen.left_out, "control record")} left out`) : null),
      table("Records", ["#Offset", "State", "Time", "Key", "Value", "Headers", "Producer"], seen.records.map((record) => record.marker
        ? h("tr", { class: "marker" }, h("td", { class: "num mono" }, record.offset), h("td", {}, chip(record.marker, record.marker === "COMMIT" ? "committed" : "aborted")), h("td", { class: "small" }, day(record.timestamp)), h("td", { colspan: 3 }, `control record: ends the transaction of producer ${record.producer_id}`), h("td", { class: "mono small" }, `${record.producer_id} / ${record.epoch}`))
        : h("tr", { class: `r-${states[record.state]}` }, h("td", { class: "num mono" }, record.offset), h("td", {}, chip(record.state, states[record.state])), h("td", { class: "small" }, day(record.timestamp)), h("td", { class: "id" }, bytes(record.key, { ...place, offset: record.offset }, "key")), h("td", { class: "wide" }, bytes(record.value, { ...place, offset: record.offset }, "value")),
          h("td", { class: "small" }, record.headers.map(([name, value]) => h("div", {}, h("b", {}, name), " ", bytes(value, place, "")))), h("td", { class: "mono small" }, record.producer_id < 0 ? "" : `${record.producer_id} / ${record.epoch} seq ${record.sequence}`))), seen.end > seen.start ? "There are no records here, only control records or what compaction took." : "The partition is empty.")];
  },
  transactions: async (query) => {
    const seen = await ask("transactions", query);
    return [heading("Transactions", some(seen.total, "transactional id")), h("div", { class: "filters" }, search(query, "transactions", "Search transactional ids"),
      h("select", { "aria-label": "State", onchange: (event) => go("transactions", { ...query, state: event.target.value }) }, h("option", { value: "" }, "any state"), seen.states.map((state) => h("option", { value: state, selected: state === query.state }, state)))),
      table("Transactional ids", TRANSACTION_HEADS, transactionRows(seen.rows), "There is no such transactional id.")];
  },
  transaction: async (query) => {
    const seen = await ask("transaction", { id: query.id }), isOpen = seen.state === "Ongoing";
    const steps = query.all === "1" ? seen.steps : seen.steps.slice(seen.last);
    return [heading(seen.id, [chip(seen.state), ` producer ${seen.producer_id}, epoch ${seen.epoch}`, isOpen && seen.age_ms !== null ? `, open for ${lasting(seen.age_ms)}` : "", seen.timeout_ms ? `, timeout ${lasting(seen.timeout_ms)}` : ", no timeout (two-phase commit)"]),
      isOpen ? h("div", { class: "filters" }, mayChange ? h("button", { type: "button", class: "danger", onclick: () => confirmAbort(seen.id, seen.is_two_phase) }, "Abort …") : h("span", { class: "quiet small" }, "This page is read-only: ", h("code", {}, seen.abort_command), " aborts it")) : null,
      seen.bars.length ? [h("h2", {}, "What it is open in"), h("div", { class: "panel" }, h("div", { class: "bars named" }, seen.bars.map((bar) => barOf(bar, `${bar.topic}-${bar.partition}`))))] : null,
      h("h2", {}, query.all === "1" ? "All steps that are known" : "The last transaction step by step"), h("p", { class: "quiet small" }, "Numbers as in the figure of KIP-98. ", seen.has_events ? "" : "Events of the broker are not available: it is not semel's. This is from the coordinator's log and the partitions. ", h("a", { href: to("transaction", { id: seen.id, all: query.all !== "1" }) }, query.all === "1" ? "only the last transaction" : "all steps")),
      h("div", { class: "panel" }, steps.length ? h("ol", { class: "line" }, steps.map((step) => h("li", { class: step.error ? "bad" : "" }, h("span", { class: `n s${step.step[0]}` }, step.step), h("div", {}, h("p", {}, h("b", {}, step.what), " ", h("span", { class: "t" }, clock(step.time_ms))), step.text ? h("p", {}, step.text) : null, step.error ? h("p", { class: "e" }, `refused: ${step.error}`) : null, step.client ? h("p", { class: "t" }, `by ${step.client}`) : null)))) : h("div", { class: "empty" }, "No transaction of this id is known."))];
  },
  producers: async () => {
    const seen = await ask("producers");
    return [heading("Producer ids and epochs", "Who got which epoch of a transactional id, and who was refused since: the newest first."), seen.has_events
      ? table("Epochs", ["Time", "Transactional id", "#Producer / epoch", "What", "Client"], seen.rows.map((row) => h("tr", {}, h("td", { class: "small" }, day(row.time_ms)), h("td", { class: "id" }, transactionLink(row.id)), h("td", { class: "num mono" }, row.producer_id < 0 ? "–" : `${row.producer_id} / ${row.epoch}`), h("td", {}, row.is_refused ? chip(row.what, "aborted") : row.what), h("td", { class: "small" }, row.client))), "Nobody has taken a transactional id since the broker started.")
      : h("div", { class: "panel" }, h("div", { class: "empty" }, "Not available: only semel's broker keeps these events. A transaction's own page shows what the coordinator's log has."))];
  },
  groups: async (query) => {
    const seen = await ask("groups", query);
    return [heading("Groups", some(seen.total, "group")), h("div", { class: "filters" }, search(query, "groups", "Search groups")),
      table("Groups", ["Group", "State", "#Partitions", "#Lag", "Lag over time", ""], seen.rows.map((row) => h("tr", {}, h("td", { class: "id" }, h("a", { href: to("group", { id: row.id }) }, row.id)), h("td", {}, chip(row.state)), h("td", { class: "num" }, row.partitions), h("td", { class: "num" }, count(row.lag)), h("td", {}, line(row.history, "mini", "Lag")), h("td", {}, row.unstable ? chip(`${row.unstable} pending`, "open") : ""))), "There is no such group.")];
  },
  group: async (query) => {
    const seen = await ask("group", { id: query.id });
    return [heading(seen.id, [chip(seen.state), ` ${seen.protocol || ""} ${seen.assignor || ""}`]), h("h2", {}, "Lag over time"), h("div", { class: "panel" }, h("div", { class: "pad" }, line(seen.history, "plot", "Lag"))),
      h("h2", {}, "Offsets"), table("Offsets", ["Partition", "#Committed", "#End", "#Lag", "Member", ""], seen.offsets.map((row) => h("tr", {}, h("td", {}, h("a", { href: to("records", { topic: row.topic, partition: String(row.partition), offset: row.committed === null ? "end" : String(row.committed) }) }, `${row.topic}-${row.partition}`)), h("td", { class: "num mono" }, count(row.committed)), h("td", { class: "num mono" }, count(row.end)), h("td", { class: "num mono" }, count(row.lag)), h("td", { class: "small" }, row.client_id || ""), h("td", {}, seen.unstable.includes(`${row.topic}-${row.partition}`) ? chip("pending in a transaction", "open") : ""))), "The group has committed nothing."),
      h("h2", {}, "Members"), table("Members", ["Client", "Host", "Member id", "Partitions"], seen.members.map((row) => h("tr", {}, h("td", {}, row.client_id), h("td", {}, row.host), h("td", { class: "mono small wide" }, row.member_id), h("td", { class: "small wide" }, row.partitions.map(([topic, index]) => `${topic}-${index}`).join(", ")))), "The group has no members now.")];
  },
  applications: async () => {
    const seen = await ask("applications");
    return [heading("Spark applications", "By their ledgers: one entry for each committed micro-batch."), table("Applications", ["Application", "#Entry", "#Batch", "#Rows", "#Took", "Committed"], seen.rows.map((row) => h("tr", {}, h("td", { class: "id" }, h("a", { href: to("application", { id: row.id }) }, row.id)), h("td", { class: "num" }, row.sequence), h("td", { class: "num" }, row.batch_id), h("td", { class: "num" }, count(row.rows)), h("td", { class: "num" }, row.took_ms ? lasting(row.took_ms) : "–"), h("td", { class: "small" }, day(row.committed_at_ms)))), "No application has written a ledger here.")];
  },
  application: async (query) => {
    const seen = await ask("application", { id: query.id }), longest = Math.max(...seen.rows.map((row) => row.took_ms), 1);
    return [heading(seen.id, `${seen.rows.length === 1 ? "The only batch" : `The last ${seen.rows.length} batches, the newest first`}. Its lag is that of the group ${seen.id}.`), h("p", {}, h("a", { href: to("group", { id: seen.id }) }, "group"), " · ", h("a", { href: to("transaction", { id: seen.id }) }, "transactions"), " · ", h("a", { href: to("records", { topic: `${seen.id}.ledger`, partition: "0" }) }, "ledger")),
      table("Batches", ["#Entry", "#Batch", "Committed", "#Took", "", "#Rows", "#Dead letters", "#Attempts", "Read", "Written"], seen.rows.map((row) => h("tr", {}, h("td", { class: "num" }, row.sequence), h("td", { class: "num" }, row.batch_id), h("td", { class: "small" }, day(row.committed_at_ms)), h("td", { class: "num" }, row.took_ms ? lasting(row.took_ms) : "–"), h("td", {}, h("svg:svg", { class: "mini", viewBox: "0 0 100 22", preserveAspectRatio: "none", "aria-hidden": "true" }, h("svg:rect", { class: "done", y: 6, height: 10, width: (row.took_ms / longest) * 100 }))), h("td", { class: "num" }, count(row.rows)), h("td", { class: "num" }, count(row.dead_letters)), h("td", { class: "num" }, row.attempts), h("td", { class: "small wide" }, row.gap ? chip(`gap: ${row.gap}`, "aborted") : "", row.ranges.map((text) => h("div", {}, text))), h("td", { class: "small wide" }, row.written.map((text) => h("div", {}, text))))), "The ledger has no entries.")];
  },
  doctor: async () => {
    const seen = await ask("doctor");
    known.findings = seen.findings.length;
    return [heading("The doctor", `Looked at ${clock(seen.at_ms)}, in ${lasting(seen.took_ms)}. It looks again after 20 seconds, later on a large cluster.`), h("div", { class: "filters" }, h("button", { type: "button", onclick: async () => { await ask("doctor", { fresh: "1" }).catch(() => 0); refresh(); } }, "Look now")),
      h("div", { class: "panel" }, seen.findings.length ? seen.findings.map((each) => h("article", { class: "finding", "aria-label": `${each.name}: ${each.where}` }, h("h3", {}, `${each.name}: ${each.where} `, chip(each.certainty)), h("p", {}, `${each.title}: ${each.seen}.`), h("p", { class: "quiet" }, each.meaning), h("div", { class: "cure" }, h("span", { class: "quiet small" }, each.is_command ? "cure" : "what to do"), each.is_command ? h("code", {}, each.cure) : each.cure, each.abort ? h("a", { href: to("transaction", { id: each.abort }) }, "step by step") : null, each.abort && mayChange ? h("button", { type: "button", class: "danger", onclick: () => confirmAbort(each.abort, false) }, "Abort …") : null))) : h("div", { class: "empty" }, "Nothing was found.")),
      seen.not_looked_at.length ? h("p", { class: "quiet small" }, `Not looked at: ${seen.not_looked_at.join("; ")}`) : null];
  },
};

// --- changes ---
const dialog = document.getElementById("dialog");
function open(title, text, label, act) {
  dialog.replaceChildren(h("h2", { id: "dialog-title" }, title), h("p", {}, text), h("p", { class: "banner", id: "dialog-error", hidden: true, role: "alert" }), h("div", { class: "row" }, h("button", { type: "button", onclick: () => dialog.close() }, act ? "Cancel" : "Close"), act ? h("button", { type: "button", class: "danger", id: "dialog-do", onclick: async (event) => {
    event.target.disabled = true;
    try { await act(); dialog.close(); refresh(); } catch (error) { const said = document.getElementById("dialog-error"); said.textContent = error.message; said.hidden = false; event.target.disabled = false; }
  } }, label) : null));
  dialog.showModal();
}
const confirmAbort = (id, twoPhase) => open(`Abort the transaction of ${id}?`, `What it has written so far is discarded, its producer is fenced, and readers go on.${twoPhase ? " It is a two-phase commit: its database may have decided to commit it." : ""}`, "Abort it", () => change("abort", { id }));
const confirmHanging = (bar, holder) => open(`End the hanging transaction in ${bar.topic}-${bar.partition}?`, `No coordinator knows it. An abort marker for producer ${holder.producer_id} is written, and readers go on.`, "End it", () => change("abort-hanging", { topic: bar.topic, partition: bar.partition, start_offset: holder.since_offset }));

// --- going from view to view ---
const known = {};
let asked = 0, finished = 0, typing = null;  // the numbers of the newest reading and of the last one that ended
const later = (act) => { clearTimeout(typing); typing = setTimeout(act, 200); };
function go(view, query) { location.hash = to(view, query).slice(1); }
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path in views ? path : "", query: Object.fromEntries(new URLSearchParams(query || "")) };
}
const HOME = { topic: "topics", records: "topics", transaction: "transactions", group: "groups", application: "applications" };
function showNav(view) {
  const chosen = HOME[view] || view;
  morph(document.getElementById("nav"), h("nav", { id: "nav", "aria-label": "Views" }, VIEWS.map(([name, title], at) => h("a", { href: `#/${name}`, "aria-current": name === chosen ? "page" : null, title: `key ${at + 1}` }, title, name === "doctor" && known.findings ? h("span", { class: "count" }, known.findings) : null))));
}
async function refresh(isNew = false) {
  const { view, query } = place(), mine = ++asked;
  showNav(view);
  let content;
  try { content = await views[view](query); } catch (error) {
    if (mine !== asked) return;
    finished = mine;
    if (!isNew && error.status !== 404) { banner(error.message); return; }  // what is shown stays; it is only old
    content = [h("h1", {}, error.status === 404 ? "Not found" : "This cannot be shown now"), h("p", { class: "lead" }, error.message)];
  }
  if (mine !== asked) return;
  finished = mine;
  showNav(view);
  morph(main, h("main", { id: "main", tabindex: "-1", "data-view": view || "overview", "data-ready": "1" }, content.flat(3)));
  document.title = `${main.querySelector("h1")?.textContent || "semel"} · semel`;
  if (isNew) { main.focus({ preventScroll: true }); scrollTo(0, 0); document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" }); }
}
function banner(text) { const node = document.getElementById("banner"); node.hidden = !text; if (node.textContent !== (text || "")) node.textContent = text || ""; }
let shown = "";
addEventListener("hashchange", () => { const { view } = place(); const isSearch = document.activeElement?.id === "search" && view === shown; shown = view; main.removeAttribute("data-ready"); refresh(!isSearch); });

// --- live ---
const live = document.getElementById("live");
function say(text, kind) { live.textContent = text; live.className = `live ${kind}`; }
function listen() {
  const source = new EventSource("api/live");
  source.onmessage = (event) => {
    const state = JSON.parse(event.data);
    say(state.ok ? "live" : "no response", state.ok ? "ok" : "bad");
    banner(state.ok ? "" : `${state.error} — it is tried again`);
    // A reading that takes longer than a tick is awaited: one that starts anew at every tick would never be shown.
    if (state.ok && !dialog.open && finished === asked) refresh();
  };
  source.onerror = () => { say("page server away", "bad"); };  // the browser connects again by itself
}
setInterval(async () => { try { known.findings = (await ask("doctor")).findings.length; showNav(place().view); } catch { /* the banner says it */ } }, 15000);

// --- keys and colours ---
addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey || dialog.open) { if (event.key === "Escape") event.target.blur(); return; }
  if (/^[1-7]$/.test(event.key)) location.hash = `/${VIEWS[event.key - 1][0]}`;
  else if (event.key === "/") { document.getElementById("search")?.focus(); event.preventDefault(); }
  else if (event.key === "r") refresh();
  else if (event.key === "d") switchTheme();
  else if (event.key === "?") help();
});
function help() { open("Keyboard shortcuts", [VIEWS.map(([, title], at) => h("span", {}, h("kbd", {}, at + 1), ` ${title}  `)), h("br"), h("kbd", {}, "/"), " search  ", h("kbd", {}, "r"), " read again  ", h("kbd", {}, "d"), " light or dark  ", h("kbd", {}, "?"), " this"]); }
function switchTheme() {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("semel-theme", document.documentElement.dataset.theme); } catch { /* only for this visit then */ }
}
try { const theme = localStorage.getItem("semel-theme"); if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme; } catch { /* none kept */ }
document.getElementById("theme").onclick = switchTheme;
document.getElementById("keys").onclick = help;
shown = place().view;
refresh(true);
ask("doctor").then((seen) => { known.findings = seen.findings.length; refresh(); }).catch(() => 0);
listen();
