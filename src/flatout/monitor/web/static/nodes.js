// The nodes of a fleet, one line each; a click opens the charts of one.

import * as format from "./format.js";
import { BOUNDS, make } from "./panel.js";

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
    const focused = this.body.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.key : null;
    this.body.replaceChildren(...nodes.map((entry) => this.row(entry)));
    if (focused !== null) [...this.body.rows].find((row) => row.dataset.key === focused)?.querySelector("button").focus();
  }

  row(entry) {
    const row = make("tr");
    row.dataset.key = entry.key;
    row.classList.toggle("shown", this.isShown(entry.key));
    const name = make("button", entry.node, "name");
    name.type = "button";
    name.addEventListener("click", () => this.open(entry.key));
    const first = make("td");
    first.append(name);
    row.append(
      first,
      make("td", entry.name),
      make("td", entry.state, `state ${entry.state}`),
      make("td", format.plain(entry.steps_per_s), "number-of"),
      make("td", format.plain(entry.loss), "number-of"),
      make("td", format.share(entry.gpu_share), "number-of"),
      make("td", format.share(entry.gpu_memory_share), "number-of"),
      make("td", format.share(entry.cpu_share), "number-of"),
      make("td", entry.bound === undefined ? "" : (BOUNDS[entry.bound] ?? entry.bound), "verdict-of"),
    );
    return row;
  }
}
