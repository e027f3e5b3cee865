// The search of the site, in place of MkDocs' own worker: that one splits neither names nor paths, takes `logp/right:` for a
// field of its query language, and ranks a page by its rarest word however many of the others it lacks.
importScripts("lunr.js");

const entries = new Map();    // location -> {title, text, location}
const waiting = [];           // what was asked before the index was there
let index = null;

// What was measured comes after what is to be done.
const EVIDENCE = /^(benchmarks|study|collapse_bench|monitor_evidence|evaluation_measured)\//;

// What is often typed, in the words of these pages.
const SAME = {
  asynchronous: ["staleness"], async: ["staleness"], ckpt: ["checkpoint"], continue: ["resume"], custom: ["own"], hf: ["huggingface"], hyperparameter: ["settings"], lr: ["rate"], multinode: ["nodes"],
  nan: ["nonfinite"], quantized: ["quantised"], sft: ["supervised"], tb: ["tensorboard"],
};
// lunr leaves out words that say little, as `the`. These pages have parts of your own.
const says = word => word === "own" || Boolean(lunr.stopWordFilter(word));
const sayingWords = token => says(token.toString()) ? token : undefined;
lunr.Pipeline.registerFunction(sayingWords, "sayingWords");
const ways = word => [word, ...(SAME[word] || [])];

// `eval/answers.jsonl` is found by its whole name and by each of its parts.
function words(text) {
  const found = [];
  for (const run of text.toLowerCase().split(/\s+/)) {
    const whole = run.replace(/^[^\p{L}\p{N}]+|[^\p{L}\p{N}]+$/gu, "");
    const parts = whole.split(/[^\p{L}\p{N}]+/u).filter(Boolean);
    found.push(...parts);
    if (parts.length > 1) found.push(whole);
  }
  return found;
}

function tokens(text, metadata) {
  return words(text || "").map(word => new lunr.Token(word, {...metadata}));
}

const titled = (name, heading) => heading.toLowerCase().startsWith(name.toLowerCase()) ? heading : `${name}: ${heading}`;

// MkDocs lists each page, and behind it the page's headings, of which the first is its title. One entry holds the name in the
// navigation, that title, what stands below it, and the words of the whole page in a field that counts for less.
function entriesOf(docs) {
  let name = "";
  let page = null;
  for (const {location, title, text} of docs) {
    if (!location.includes("#")) {
      name = title;
      page = {location, title, text: "", whole: text};
      entries.set(location, page);
    } else if (page) {
      page.title = titled(name, title);
      page.text = text;
      page = null;
    } else {
      entries.set(location, {location, title: `${name}: ${title}`, text, whole: ""});
    }
  }
}

function build(docs) {
  entriesOf(docs);
  index = lunr(function () {
    this.tokenizer = tokens;
    this.pipeline.before(lunr.stopWordFilter, sayingWords);
    this.pipeline.remove(lunr.stopWordFilter);
    this.b(0.4);
    this.ref("location");
    this.field("title", {boost: 6});
    this.field("text");
    this.field("whole", {boost: 0.3});
    entries.forEach(entry => this.add(entry, {boost: EVIDENCE.test(entry.location) ? 0.5 : 1}));
  });
}

const stem = word => lunr.stemmer(new lunr.Token(word, {})).toString();

function summary(text, asked) {
  const low = text.toLowerCase();
  const at = Math.min(...asked.map(word => low.indexOf(word)).filter(place => place >= 0), text.length);
  const from = at > 140 && at < text.length ? low.indexOf(" ", at - 60) + 1 : 0;
  return (from ? "... " : "") + text.slice(from, from + 200);
}

// An entry with all words of a question stands before one with a rare word alone. The last word may be unfinished.
function search(query) {
  const asked = [...new Set(words(query))].filter(says);
  if (!asked.length) return [];
  const last = asked[asked.length - 1];
  const found = index.query(terms => {
    asked.flatMap(ways).forEach(word => terms.term(word, {}));
    if (last.length > 2) terms.term(last, {usePipeline: false, wildcard: lunr.Query.wildcard.TRAILING, boost: 0.2});
  });
  const stems = asked.map(word => ways(word).map(stem));
  for (const result of found) {
    const matched = Object.keys(result.matchData.metadata);
    const seen = stems.filter((words, at) =>
      matched.some(term => words.includes(term) || (asked[at] === last && term.startsWith(last))));
    result.score *= (seen.length / stems.length) ** 2;
  }
  found.sort((a, b) => b.score - a.score);
  return found.map(({ref}) => {
    const {location, title, text, whole} = entries.get(ref);
    return {location, title, summary: summary(text || whole, asked)};
  });
}

const answer = query => postMessage({query, results: search(query)});

onmessage = async ({data}) => {
  if (data.query && index) answer(data.query);
  else if (data.query) waiting.push(data.query);
  if (!data.init) return;
  const {config, docs} = await (await fetch("search_index.json")).json();
  build(docs);
  postMessage({config});
  postMessage({allowSearch: true});
  waiting.splice(0).forEach(answer);
};
