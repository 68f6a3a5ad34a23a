// The tables of runs and of a fleet's nodes, one line each; a click on a name opens its charts.

import * as format from "./format.js";
import { BOUNDS, make } from "./panel.js";

function makeButton(text, className, click) {
  const button = make("button", text, className);
  button.type = "button";
  button.addEventListener("click", click);
  return button;
}

function makeRow(entry, isShown, cells) {
  const row = make("tr");
  row.dataset.key = entry.key;
  row.classList.toggle("shown", isShown);
  row.append(...cells);
  return row;
}

function makeCell(...children) {
  const cell = make("td");
  cell.append(...children);
  return cell;
}

// Replace the rows of a table; the focus stays on the button that has it.
function refill(body, rows) {
  const focused = body.contains(document.activeElement) ? document.activeElement : null;
  const key = focused?.closest("tr").dataset.key;
  body.replaceChildren(...rows);
  if (focused !== null) [...body.rows].find((row) => row.dataset.key === key)?.querySelector(`button.${focused.className}`)?.focus();
}

export class RunTable {
  constructor(node, { isShown, open, toggle }) {
    Object.assign(this, { node, isShown, open, toggle, entries: [], most: 4 });
    this.body = node.querySelector("tbody");
    this.search = node.querySelector("input");
    this.search.addEventListener("input", () => this.draw());
    node.addEventListener("toggle", () => node.open && this.search.focus());
  }

  take({ runs, unlisted, most }) {
    this.entries = runs;
    this.most = most;
    this.node.querySelector(".most").textContent = String(most);
    this.node.querySelector(".number").textContent = String(runs.length + unlisted);
    const rest = this.node.querySelector(".unlisted");
    rest.hidden = unlisted === 0;
    rest.textContent = `${unlisted} older runs are not listed here: flatout watch --list shows all.`;
    this.draw();
  }

  draw() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter((word) => word !== "");
    const isFound = (entry) => words.every((word) => [entry.name, entry.key, entry.command ?? "", entry.ending, BOUNDS[entry.bound] ?? ""].join(" ").toLowerCase().includes(word));
    const found = this.entries.filter(isFound);
    refill(this.body, found.map((entry) => this.row(entry)));
    if (found.length === 0) {
      const cell = make("td", this.entries.length === 0 ? "There is no run yet." : "No run has these words.", "none");
      cell.colSpan = 7;
      this.body.append(make("tr"));
      this.body.lastElementChild.append(cell);
    }
  }

  row(entry) {
    const isShown = this.isShown(entry.key);
    const end_s = entry.ended_s ?? entry.last_s;
    const lasted = entry.started_s === undefined || end_s === undefined ? "" : format.duration(end_s - entry.started_s);
    const [state, ...reason] = entry.ending.split(": ");
    const name = makeCell(makeButton(entry.name, "name", () => this.open(entry.key)));
    if (entry.command) name.append(make("small", entry.command, "command"));
    const ending = make("td", state, `state ${entry.state} ${state}`);
    if (reason.length > 0) ending.append(make("small", reason.join(": "), "reason"));
    const beside = makeButton(isShown ? "remove" : "compare", "beside", () => this.toggle(entry.key, !isShown));
    beside.setAttribute("aria-label", `${isShown ? "Remove" : "Compare"} ${entry.name}`);
    const num = this.entries.filter(({ key }) => this.isShown(key)).length;
    beside.disabled = isShown ? num === 1 : num >= this.most;
    return makeRow(entry, isShown, [
      name,
      ending,
      make("td", BOUNDS[entry.bound] ?? entry.bound ?? format.UNKNOWN, "verdict-of"),
      make("td", format.plain(entry.loss), "number-of"),
      make("td", entry.started_s === undefined ? "" : format.day(entry.started_s), "when"),
      make("td", lasted, "when"),
      makeCell(beside),
    ]);
  }
}

export class NodeTable {
  constructor(node, { isShown, open }) {
    Object.assign(this, { node, isShown, open });
    this.body = node.querySelector("tbody");
  }

  take({ runs }) {
    const nodes = runs.filter((entry) => entry.node !== undefined);
    this.node.hidden = nodes.length === 0;
    if (nodes.length === 0) return;
    const running = nodes.filter((entry) => entry.state === "running").length;
    this.node.querySelector("caption").textContent = `${nodes.length} nodes, ${running} running`;
    refill(this.body, nodes.map((entry) => this.row(entry)));
  }

  row(entry) {
    const { steps_per_s, loss, gpu_share, gpu_memory_share, cpu_share } = entry;
    const figures = [format.plain(steps_per_s), format.plain(loss), ...[gpu_share, gpu_memory_share, cpu_share].map(format.share)];
    return makeRow(entry, this.isShown(entry.key), [
      makeCell(makeButton(entry.node, "name", () => this.open(entry.key))),
      make("td", entry.name),
      make("td", entry.state, `state ${entry.state}`),
      ...figures.map((figure) => make("td", figure, "number-of")),
      make("td", entry.bound === undefined ? "" : (BOUNDS[entry.bound] ?? entry.bound), "verdict-of"),
    ]);
  }
}
