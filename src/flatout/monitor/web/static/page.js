// The page: which runs are shown, how far back, in which theme, and what the connection says.

import { forgetColours } from "./charts.js";
import { Feed } from "./feed.js";
import * as format from "./format.js";
import { Panel, make } from "./panel.js";

const main = document.getElementById("runs");
const chooser = document.querySelector(".chooser");
const status = document.querySelector(".status");
const panels = new Map();
let entries = [];
let most = 4;
let range_s = 300;
let state = "connecting";

const peers = () => [...panels.values()].map((panel) => panel.store);
const announce = (text) => {
  document.getElementById("said").textContent = text;
};

// Runs

function show(keys, { isAsked }) {
  for (const [key, panel] of panels) {
    if (!keys.includes(key)) {
      panel.close();
      panels.delete(key);
    }
  }
  for (const key of keys) {
    if (!panels.has(key)) {
      const panel = new Panel(key, { close: (closed) => choose(closed, false), peers, announce });
      panels.set(key, panel);
      main.append(panel.node);
    }
  }
  main.dataset.count = String(keys.length);
  nameAll();
  if (isAsked) {
    const query = new URLSearchParams(keys.map((key) => ["run", key]));
    history.replaceState(null, "", `?${query}`);
    feed.open(keys);
  }
}

function choose(key, isShown) {
  const keys = [...panels.keys()].filter((shown) => shown !== key);
  if (isShown) keys.push(key);
  if (keys.length > 0 && keys.length <= most) show(keys, { isAsked: true });
  listRuns();
}

function nameAll() {
  for (const [key, panel] of panels) panel.entry = entries.find((entry) => entry.key === key) ?? panel.entry;
}

function listRuns() {
  chooser.querySelector(".number").textContent = String(entries.length);
  const list = chooser.querySelector("ul");
  const focused = list.contains(document.activeElement) ? document.activeElement.value : null;
  list.replaceChildren(
    ...entries.map((entry) => {
      const isShown = panels.has(entry.key);
      const box = Object.assign(make("input"), { type: "checkbox", value: entry.key, checked: isShown });
      box.disabled = isShown ? panels.size === 1 : panels.size >= most;
      box.addEventListener("change", () => choose(entry.key, box.checked));
      const label = make("label");
      const when = entry.started_s === undefined ? "" : format.day(entry.started_s);
      label.append(box, make("span", entry.name, "name"), make("span", entry.state, `state ${entry.state}`), make("span", when, "when"));
      const item = make("li");
      item.append(label);
      return item;
    }),
  );
  if (focused !== null) [...list.querySelectorAll("input")].find((box) => box.value === focused)?.focus();
}

// Events

function hear(name, message) {
  if (name === "runs") {
    ({ runs: entries, most } = message);
    chooser.querySelector(".most").textContent = String(most);
    if (panels.size === 0) show(message.first, { isAsked: false });
    nameAll();
    listRuns();
    if (panels.size === 0) main.replaceChildren(make("p", "There is no run yet. One appears here when a job calls flatout.watch().", "nothing"));
  } else if (name === "history") {
    panels.get(message.run)?.store.takeHistory(message);
  } else if (name === "sample") {
    panels.get(message.run)?.store.takeSample(message);
  }
  if (name !== "beat") draw();
  if (name === "ready") main.removeAttribute("aria-busy");
}

let isDrawing = false;
function draw() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    for (const panel of panels.values()) panel.update(range_s);
    const names = [...panels.values()].map((panel) => panel.name);
    document.title = names.length > 0 ? `${names.join(", ")} · flatout watch` : "flatout watch";
  });
}

function tell(said) {
  state = said;
  status.dataset.state = said;
  const words = { connecting: "connecting", live: "live", lost: "no answer: open the address that flatout printed" };
  const text = status.querySelector("span");
  if (text.textContent !== words[said]) text.textContent = words[said];
}

const feed = new Feed({ hear, tell });

// Controls

document.querySelector(".range").addEventListener("change", (event) => {
  range_s = Number(event.target.value);
  draw();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chooser.open) {
    chooser.open = false;
    chooser.querySelector("summary").focus();
  }
});
document.addEventListener("pointerdown", (event) => {
  if (chooser.open && !chooser.contains(event.target)) chooser.open = false;
});

const dark = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;
const isDark = () => (root.dataset.theme === undefined ? dark.matches : root.dataset.theme === "dark");

function recolour() {
  forgetColours();
  document.querySelector(".theme").setAttribute("aria-label", isDark() ? "Change to light" : "Change to dark");
  for (const panel of panels.values()) panel.redraw();
}

document.querySelector(".theme").addEventListener("click", () => {
  const chosen = isDark() ? "light" : "dark";
  // What the system says is not stored, so that the page follows it again.
  if ((chosen === "dark") === dark.matches) delete root.dataset.theme;
  else root.dataset.theme = chosen;
  try {
    if (root.dataset.theme === undefined) localStorage.removeItem("flatout-theme");
    else localStorage.setItem("flatout-theme", chosen);
  } catch {
    // Nothing is kept here: the theme lasts as long as the page.
  }
  recolour();
});
dark.addEventListener("change", recolour);

const asked = new URLSearchParams(location.search).getAll("run");
if (asked.length > 0) show(asked, { isAsked: false });
feed.open(asked);
recolour();
