// Live figures, once a second from /stats; less often while the page is hidden.

import { askForKey, getJson } from "./net.js";

const $ = (id) => document.getElementById(id);
const POINTS = 60;
const rates = [];
let last = null;

const count = (n) => (n ?? 0).toLocaleString("en");
const seconds = (s) => (s === null || s === undefined ? "–" : s < 10 ? `${s.toFixed(2)} s` : `${Math.round(s)} s`);

function span(s) {
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 129600) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} days`;
}

function setStatus(word, text) {
  $("status").textContent = text ?? word;
  $("status").className = `pill ${word}`;
}

function drawRate(now) {
  if (last && now.now > last.now && now.generation_tokens >= last.generation_tokens) {
    rates.push((now.generation_tokens - last.generation_tokens) / (now.now - last.now));
    if (rates.length > POINTS) rates.shift();
  }
  last = now;
  if (!rates.length) return;
  const newest = rates.slice(-3);
  const rate = newest.reduce((a, b) => a + b, 0) / newest.length;
  $("rate").textContent = rate < 10 ? rate.toFixed(1) : Math.round(rate);
  const most = Math.max(1, ...rates);
  const points = rates.map((r, n) => `${120 - 120 * (rates.length - 1 - n) / (POINTS - 1)},${30 - 28 * r / most}`);
  $("spark").firstElementChild.setAttribute("points", points.join(" "));
}

function drawDrafts(drafting) {
  const made = drafting?.drafted_at ?? [];
  const kept = drafting?.accepted_at ?? [];
  const total = made.reduce((a, b) => a + b, 0);
  $("kept").textContent = total ? `${Math.round(100 * kept.reduce((a, b) => a + b, 0) / total)} %` : "–";
  $("places").replaceChildren(...made.map((n, place) => {
    const bar = document.createElement("i");
    bar.style.height = `${n ? Math.round(100 * (kept[place] ?? 0) / n) : 0}%`;
    return bar;
  }));
}

function drawPool(health) {
  const all = health.pool_tokens;
  $("pooltile").hidden = !all;
  if (!all) return;
  const saved = health.pool_prefix_tokens, used = all - health.pool_free_tokens - saved;
  $("poolused").style.width = `${100 * used / all}%`;
  $("poolsaved").style.width = `${100 * saved / all}%`;
  $("pool").textContent = `${count(used)} in use, ${count(saved)} saved prefixes, ${count(health.pool_free_tokens)} free of ${count(all)} tokens`;
}

function fill(table, rows, empty) {
  const body = table.tBodies[0];
  if (!rows.length) rows = [[{ text: empty, name: "none", span: table.tHead.rows[0].cells.length }]];
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const made = row.insertCell();
      const { text, name, span } = typeof cell === "object" ? cell : { text: cell };
      made.textContent = text;
      if (name) made.className = name;
      if (span) made.colSpan = span;
    }
    return row;
  }));
}

function drawTables(stats) {
  fill($("open"), stats.open.map((r) => [
    r.key ?? r.route, { text: r.phase, name: "word" }, count(r.prompt), count(r.completion), span(r.for_s),
  ]), "nothing runs");
  fill($("recent"), stats.recent.map((r) => [
    `${span(Math.max(0, stats.now - r.ts - r.total_s))} ago`, { text: r.key ?? r.route, name: "word" },
    count(r.prompt), count(r.cached), count(r.completion), seconds(r.first_s),
    r.decode_tokens_per_s ? r.decode_tokens_per_s.toFixed(1) : "–",
    { text: r.error ?? r.finish, name: r.error ? "word bad" : "word" },
  ]), "no request yet");
}

function draw(stats) {
  const health = stats.health;
  $("model").textContent = health.model;
  document.title = `${health.model} · twinspark`;
  const text = health.status === "loading" ? `${health.phase} ${Math.round(100 * health.fraction)} %` : health.status;
  setStatus(health.status, text);
  $("running").textContent = health.running ?? stats.open.length;
  $("slots").textContent = health.slots ? `of ${health.slots} slots` : "";
  $("waiting").textContent = health.waiting ?? 0;
  $("uptime").textContent = `up ${span(health.uptime_s)}`;
  const prompt = stats.prompt_tokens;
  $("cached").textContent = prompt ? `${Math.round(100 * stats.cached_tokens / prompt)} %` : "–";
  $("totals").textContent = `${count(prompt)} in, ${count(stats.generation_tokens)} out`;
  drawRate(stats);
  drawDrafts(stats.drafting);
  drawPool(health);
  drawTables(stats);
}

async function look() {
  try {
    const stats = await getJson("stats");
    if (!stats) {
      $("unlock").hidden = false;
      setStatus("loading", "key needed");
      return; // until the user gives a key
    }
    $("unlock").hidden = true;
    draw(stats);
  } catch {
    setStatus("gone", "not reachable");
  }
  setTimeout(look, document.hidden ? 5000 : 1000);
}

/** Begin to look. */
export function startLive() {
  $("unlock").addEventListener("click", () => askForKey());
  document.addEventListener("keygiven", () => {
    if ($("unlock").hidden) return; // it still looks
    $("unlock").hidden = true;
    look();
  });
  look();
}
