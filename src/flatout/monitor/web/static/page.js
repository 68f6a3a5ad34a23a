// The page: which runs are shown, how far back, laid over each other or not, in which theme, and its state.

import { PALETTE, forgetColours, mainLine, setText } from "./charts.js";
import { Feed } from "./feed.js";
import * as format from "./format.js";
import { Panel, make, makeCharts } from "./panel.js";
import { NodeTable, RunTable } from "./runs.js";

const LATE_S = 15; // a run that is under way says something every second
const main = document.getElementById("runs");
const chooser = document.querySelector(".chooser");
const status = document.querySelector(".status");
const overlayButton = document.querySelector("button.overlay");
const panels = new Map();
let entries = [];
let range_s = 300;

const shownPanels = () => [...panels.values()];
const announce = (text) => {
  document.getElementById("said").textContent = text;
};

// Runs

function show(keys, { isAsked }) {
  main.querySelector(".nothing")?.remove();
  for (const [key, panel] of panels) {
    if (!keys.includes(key)) {
      panel.close();
      panels.delete(key);
    }
  }
  for (const key of keys) {
    if (!panels.has(key)) {
      const panel = new Panel(key, { close: (closed) => choose(closed, false), panels: shownPanels, announce, changed: draw });
      panels.set(key, panel);
      main.append(panel.node);
    }
  }
  main.dataset.count = String(keys.length);
  overlayButton.hidden = keys.length < 2;
  if (keys.length < 2) layOver(false);
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
  if (keys.length > 0 && keys.length <= table.most) show(keys, { isAsked: true });
  table.draw();
}

const table = new RunTable(chooser, {
  isShown: (key) => panels.has(key),
  open: (key) => {
    show([key], { isAsked: true });
    table.draw();
    chooser.open = false;
  },
  toggle: choose,
});

const nodeTable = new NodeTable(document.querySelector("section.nodes"), { isShown: (key) => panels.has(key), open: (key) => table.open(key) });

function nameAll() {
  for (const [key, panel] of panels) panel.entry = entries.find((entry) => entry.key === key) ?? panel.entry;
}

function showNone(folder) {
  if (main.querySelector(".nothing") !== null) return;
  const none = document.getElementById("none").content.firstElementChild.cloneNode(true);
  none.querySelector(".folder").textContent = folder;
  main.append(none);
}

// Runs laid over each other, each from its start

const overlaySource = {
  isOverlay: true,
  lines: (spec) =>
    shownPanels().flatMap((panel, position) => {
      const line = mainLine(spec, panel.store);
      const own = { label: panel.name, colour: PALETTE[[0, 3, 1, 4][position]], dash: undefined, store: panel.store, start_s: panel.start_s };
      return line === undefined ? [] : [{ ...line, ...own }];
    }),
  get end_s() {
    return Math.max(60, ...shownPanels().map((panel) => (panel.store.last_s ?? panel.start_s) - panel.start_s));
  },
  sharers: (name) => overlay.charts.filter((chart) => chart.spec.name === name),
};
let overlay = null;

function layOver(wanted) {
  overlayButton.setAttribute("aria-pressed", String(wanted));
  main.dataset.overlay = String(wanted);
  if (wanted === (overlay !== null)) return;
  if (!wanted) {
    for (const chart of overlay.charts) chart.close();
    overlay.node.remove();
    overlay = null;
    return;
  }
  const [node, place] = [make("section", undefined, "over"), make("div", undefined, "charts")];
  node.append(make("h2", "The runs, each from its start"), place);
  main.prepend(node);
  overlay = { node, charts: makeCharts(place, { group: "overlay", changed: draw, source: overlaySource }) };
}

// Events

function hear(name, message) {
  if (name === "runs") {
    const wasEmpty = main.querySelector(".nothing") !== null;
    entries = message.runs;
    table.most = message.most;
    if (panels.size === 0 && message.first.length > 0) show(message.first, { isAsked: wasEmpty });
    nameAll();
    table.take(message);
    nodeTable.take(message);
    if (panels.size === 0) showNone(message.folder);
  } else if (name === "history") {
    panels.get(message.run)?.store.takeHistory(message);
  } else if (name === "sample") {
    panels.get(message.run)?.store.takeSample(message);
  }
  if (name === "ready") {
    main.removeAttribute("aria-busy");
    for (const panel of panels.values()) {
      panel.isRead = true;
      // What is behind the server's clock already was late before it came.
      if (panel.store.last_s !== null) panel.store.heardAt -= Math.max(message.now_s - panel.store.last_s, 0) * 1000;
    }
  }
  if (name !== "beat") draw();
}

let isDrawing = false;
function draw() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    for (const panel of panels.values()) panel.prepare(range_s);
    for (const panel of panels.values()) panel.update({ isOverlay: overlay !== null });
    for (const chart of overlay?.charts ?? []) chart.prepare(range_s);
    for (const chart of overlay?.charts ?? []) {
      chart.card.hidden = chart.lines.length === 0;
      if (!chart.card.hidden) chart.update();
    }
    const names = shownPanels().map((panel) => panel.name);
    document.title = names.length > 0 ? `${names.join(", ")} · flatout watch` : "flatout watch";
    tellState();
  });
}

// Live, ended or lost: of the runs that are shown, not of the connection alone

let connection = "connecting";

function stateNow() {
  const shown = shownPanels();
  const known = shown.filter((panel) => panel.store.heardAt !== null);
  if (known.length > 0 && known.length === shown.length && known.every((panel) => panel.isOver)) return ["ended", "ended"];
  if (connection === "refused") return ["lost", "lost: open the address that flatout printed"];
  if (connection === "lost") return ["lost", `lost: no answer since ${format.clock(feed.lastHeard_s)}`];
  if (connection === "connecting") return ["connecting", "connecting"];
  const quiet_s = Math.min(...known.filter((panel) => !panel.isOver).map((panel) => (performance.now() - panel.store.heardAt) / 1000));
  if (Number.isFinite(quiet_s) && quiet_s > LATE_S) return ["late", `no sample for ${format.duration(quiet_s)}`];
  return shown.length === 0 ? ["live", "waiting for a run"] : ["live", "live"];
}

function tellState() {
  const [state, words] = stateNow();
  status.dataset.state = state;
  setText(status.querySelector("span"), words);
}

const feed = new Feed({
  hear,
  tell: (said) => {
    connection = said;
    tellState();
  },
});
setInterval(tellState, 1000);

// Controls

document.querySelector(".range").addEventListener("change", (event) => {
  range_s = Number(event.target.value);
  draw();
});
overlayButton.addEventListener("click", () => {
  layOver(overlay === null);
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
  for (const chart of overlay?.charts ?? []) chart.redraw();
}

document.querySelector(".theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  // What the system says is not stored, so that the page follows it again.
  if ((theme === "dark") === dark.matches) delete root.dataset.theme;
  else root.dataset.theme = theme;
  try {
    if (root.dataset.theme === undefined) localStorage.removeItem("flatout-theme");
    else localStorage.setItem("flatout-theme", theme);
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
