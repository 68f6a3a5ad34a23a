// The charts of one run: which there are, what each shows, and how it is drawn with uPlot.

import * as format from "./format.js";
import { gpuNumber } from "./store.js";

/* global uPlot */

const HEIGHT = 128;
const SHORTEST_S = 60;
const MOST_NAMED = 4;
const STALL_S = 30; // a job's figure may be missing for that long: its steps are slow
export const PALETTE = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6", "--line-7", "--line-8"];
const BINARY = Array.from({ length: 30 }, (_, power) => 2 ** (20 + power));
const HOUR = 3600;
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, HOUR, 2 * HOUR, 6 * HOUR, 12 * HOUR, 24 * HOUR, 48 * HOUR, 168 * HOUR];

// Series

function ofGpus(name) {
  return (store) => {
    const gpus = store.sample?.gpus ?? [];
    return gpus.map((gpu, position) => ({
      path: `gpu/${gpuNumber(gpu)}/${name}`,
      label: `GPU ${gpuNumber(gpu)}`,
      colour: PALETTE[position % PALETTE.length],
    }));
  };
}

const one = (path, label, colour) => () => [{ path, label, colour }];

function memorySeries(store) {
  const gpus = ofGpus("memory_used_bytes")(store);
  if (gpus.length === 1) gpus[0].label = "device";
  const own = [
    { path: "job/reserved_bytes", label: "reserved", colour: "--line-3", dash: [4, 3] },
    { path: "job/allocated_bytes", label: "allocated", colour: "--line-4", dash: [2, 2] },
  ];
  return [...gpus, ...own.filter((series) => store.has(series.path))];
}

// Limits: of the GPU that the job computes on, else of the largest

export function jobGpu(sample) {
  const gpus = sample?.gpus ?? [];
  const index = sample?.job?.gpu_index;
  return gpus.find((gpu) => gpu.index === index && gpu.mig_index === undefined) ?? (gpus.length === 1 ? gpus[0] : null);
}

function gpuLimit(name) {
  return (store) => {
    const gpus = store.sample?.gpus ?? [];
    const limits = gpus.map((gpu) => gpu[name]).filter((limit) => limit !== undefined);
    return jobGpu(store.sample)?.[name] ?? (limits.length > 0 ? Math.max(...limits) : null);
  };
}

// Ranges of the y axis; runs side by side share them

const fromZero = (highest) => [0, highest > 0 ? highest : 1];
const toLimit = (limit) => (stores, max) => fromZero(Math.max(max * 1.05, ...stores.map((store) => limit(store) ?? 0)));

function aroundAll(path) {
  return (stores) => {
    const values = stores.flatMap((store) => store.columns.get(path) ?? []).filter((value) => value !== null);
    if (values.length === 0) return [0, 1];
    const low = values.reduce((a, b) => Math.min(a, b));
    const high = values.reduce((a, b) => Math.max(a, b));
    const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [low >= 0 ? Math.max(low - pad, 0) : low - pad, high + pad];
  };
}

const upToAll = (path) => (stores) => fromZero(aroundAll(path)(stores)[1]);
const wholeShare = () => [0, 1];

export const CHARTS = [
  {
    name: "utilisation", title: "GPU utilisation", hint: "share of the time in which some kernel ran",
    needs: "gpu", series: ofGpus("utilisation_share"), show: format.share, range: wholeShare, steps: [0.25, 0.5],
  },
  {
    name: "sm", title: "SM activity", hint: "share of the GPU’s processors at work",
    needs: "gpu", series: ofGpus("sm_active_share"), show: format.share, range: wholeShare, steps: [0.25, 0.5],
  },
  {
    name: "memory", title: "GPU memory", hint: "of the device, and of PyTorch’s allocator",
    needs: "gpu", series: memorySeries, show: format.bytes, tick: format.roundBytes, limit: gpuLimit("memory_total_bytes"),
    range: toLimit(gpuLimit("memory_total_bytes")), steps: BINARY,
  },
  {
    name: "power", title: "Power", hint: "drawn by the board",
    needs: "gpu", series: ofGpus("power_w"), show: format.watts, limit: gpuLimit("power_limit_w"),
    range: toLimit(gpuLimit("power_limit_w")),
  },
  {
    name: "rate", title: "Steps", hint: "per second", needs: "job", gap_s: STALL_S,
    series: one("job/steps_per_s", "steps", "--line-4"), show: format.rate, tick: format.plain,
    range: upToAll("job/steps_per_s"),
  },
  {
    name: "loss", title: "Loss", hint: "as the job reports it", needs: "job", gap_s: STALL_S,
    series: one("job/loss", "loss", "--line-4"), show: format.plain, range: aroundAll("job/loss"), isBare: true,
  },
  {
    name: "cpu", title: "Host CPU", hint: "share of the cores the job may use",
    series: one("host/cpu_share", "CPU", "--line-2"), show: format.share, range: wholeShare, steps: [0.25, 0.5],
  },
  {
    name: "ram", title: "Host memory", hint: "of the machine, or of its container",
    series: one("host/memory_used_bytes", "RAM", "--line-2"), show: format.bytes, tick: format.roundBytes,
    limit: (store) => store.sample?.host?.memory_total_bytes ?? null,
    range: toLimit((store) => store.sample?.host?.memory_total_bytes ?? null), steps: BINARY,
  },
];

// Drawing

const colours = new Map();
const probe = document.body.appendChild(document.createElement("i"));
probe.hidden = true;

export function forgetColours() {
  colours.clear();
}

// A colour of the style sheet as the canvas wants it; the probe resolves which theme is on.
function colour(name) {
  if (!colours.has(name)) {
    probe.style.color = `var(${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}

const faint = (name) => colour(name).replace("rgb(", "rgba(").replace(")", ", 0.13)");

export function windowOf(store, range_s) {
  const last = store.last_s ?? 0;
  const first = store.times[0] ?? last;
  return { min: last - Math.min(range_s, Math.max(last - first, SHORTEST_S)), max: last };
}

export class Chart {
  constructor(card, spec, { store, peers, group }) {
    Object.assign(this, { card, spec, store, peers, group });
    this.plot = null;
    this.drawn = "";
    this.cursor = null;
    this.area = card.querySelector(".plot");
    card.querySelector("h3").textContent = spec.title;
    card.querySelector(".hint").textContent = spec.hint;
    card.dataset.chart = spec.name;
    this.area.addEventListener("keydown", (event) => this.move(event));
    this.area.addEventListener("blur", () => this.plot !== null && leave(this.plot));
    this.watcher = new ResizeObserver(() => this.plot?.setSize({ width: this.area.clientWidth, height: HEIGHT }));
    this.watcher.observe(this.area);
  }

  close() {
    this.watcher.disconnect();
    this.plot?.destroy();
  }

  update(range_s) {
    const series = this.spec.series(this.store).filter(({ path }) => this.store.has(path));
    const drawn = series.map(({ path }) => path).join(" ");
    if (drawn !== this.drawn || this.plot === null) this.build(series, drawn);
    this.series = series;
    const data = [this.store.times, ...series.map(({ path }) => this.store.columns.get(path))];
    this.plot.batch(() => {
      this.plot.setData(data, false);
      this.plot.setScale("x", windowOf(this.store, range_s));
    });
    this.card.classList.toggle("empty", series.length === 0);
    this.say();
  }

  redraw() {
    this.plot?.redraw(false, true);
    this.say();
  }

  build(series, drawn) {
    this.plot?.destroy();
    this.drawn = drawn;
    const { spec } = this;
    const font = "11px system-ui, sans-serif";
    const isAlone = series.length === 1;
    const axis = { stroke: () => colour("--soft"), font, ticks: { show: false } };
    this.plot = new uPlot(
      {
        width: this.area.clientWidth,
        height: HEIGHT,
        padding: [8, 4, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, sync: { key: this.group }, points: { size: 6 } },
        scales: { x: { time: true }, y: { range: (_, min, max) => spec.range(this.peers(), max ?? 0) } },
        axes: [
          { ...axis, size: 20, gap: 4, space: timeSpace, incrs: TIMES, grid: { show: false }, values: timeTicks },
          {
            ...axis, size: 58, gap: 6, space: 26, incrs: spec.steps ?? undefined,
            grid: { stroke: () => colour("--grid"), width: 1 },
            values: (_, ticks) => ticks.map(spec.tick ?? spec.show),
          },
        ],
        series: [
          {},
          ...series.map((line) => ({
            label: line.label,
            stroke: () => colour(line.colour),
            fill: isAlone && !spec.isBare ? () => faint(line.colour) : undefined,
            width: series.length > MOST_NAMED ? 1 : 1.5,
            dash: line.dash,
            points: { show: false },
            gaps: (plot, _side, _from, _to, found) => found.filter(([from, to]) => isLong(plot, from, to, spec.gap_s)),
          })),
        ],
        hooks: { draw: [(plot) => this.drawLimit(plot)], setCursor: [(plot) => this.point(plot.cursor.idx)] },
      },
      [[], ...series.map(() => [])],
      this.area,
    );
    this.legend(series);
  }

  drawLimit(plot) {
    const limit = this.spec.limit?.(this.store);
    if (limit === undefined || limit === null || limit > plot.scales.y.max) return;
    const { ctx, bbox } = plot;
    const y = Math.round(plot.valToPos(limit, "y", true)) + 0.5;
    ctx.save();
    ctx.strokeStyle = colour("--limit");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  }

  // In the place of the hint; the colours of many GPUs are explained by their table.
  legend(series) {
    const list = this.card.querySelector(".legend");
    const isShown = series.length > 1 && series.length <= MOST_NAMED;
    this.card.querySelector(".hint").hidden = isShown;
    list.replaceChildren(
      ...(isShown ? series : []).map((line) => {
        const item = document.createElement("li");
        item.style.setProperty("--colour", `var(${line.colour})`);
        item.append(Object.assign(document.createElement("span"), { textContent: line.label }), document.createElement("b"));
        return item;
      }),
    );
  }

  point(row) {
    const known = row ?? null;
    if (known === this.cursor) return;
    this.cursor = known;
    this.say();
  }

  // The figures in words: those under the cursor, else the latest.
  say() {
    const { spec, store } = this;
    const at = (path) => (this.cursor === null ? store.latestOf(path) : (store.columns.get(path)?.[this.cursor] ?? null));
    const series = this.series ?? [];
    const mine = jobGpu(store.sample);
    const chosen = series.find(({ path }) => mine !== null && path.startsWith(`gpu/${gpuNumber(mine)}/`)) ?? (series.length === 1 ? series[0] : null);
    const known = series.filter(({ path }) => path.startsWith("gpu/")).map(({ path }) => at(path)).filter((value) => value !== null);
    const mean = known.length > 0 ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
    const shown = spec.show(chosen !== null ? at(chosen.path) : mean);
    const limit = spec.limit?.(store) ?? null;
    const which = chosen === null && known.length > 1 ? `mean of ${known.length}` : (limit !== null ? `of ${spec.show(limit)}` : "");
    const when = this.cursor === null ? which : format.clock(store.times[this.cursor]);
    setText(this.card.querySelector(".value b"), shown);
    setText(this.card.querySelector(".value span"), when);
    this.card.querySelectorAll(".legend b").forEach((cell, position) => {
      const line = series[position];
      setText(cell, line === chosen ? "" : spec.show(at(line.path)));
    });
    this.area.setAttribute("aria-label", `${spec.title}, ${spec.hint}: ${shown}${when ? ` ${when}` : ""}`);
  }

  // With the keyboard: left and right move the cursor of all charts of the run.
  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined && event.key !== "Escape") return;
    event.preventDefault();
    const { plot, store } = this;
    if (event.key === "Escape") {
      leave(plot);
      return;
    }
    const row = Math.min(Math.max((this.cursor ?? store.times.length) + step, 0), store.times.length - 1);
    plot.setCursor({ left: plot.valToPos(store.times[row], "x"), top: HEIGHT / 2 }, true, true); // and in all charts
  }
}

function leave(plot) {
  plot.setCursor({ left: -10, top: -10 }, true, true);
}

function isLong(plot, from, to, gap_s = 0) {
  const seconds = plot.posToVal(to / devicePixelRatio, "x") - plot.posToVal(from / devicePixelRatio, "x");
  return Math.abs(seconds) > gap_s;
}

// A short window is labelled with seconds, and those need more room.
const timeSpace = (_plot, _axis, min, max) => (max - min < 240 ? 66 : 46);

function timeTicks(plot, ticks, _axis, _space, apart) {
  const show = (tick) => (apart >= 24 * HOUR ? format.day(tick).slice(5, 10) : apart >= 60 ? format.clock(tick).slice(0, 5) : format.clock(tick));
  // At an end it would be cut, or run into the figures of the other axis.
  const width = plot.bbox.width / devicePixelRatio;
  const isInside = (left) => left > 14 && left < width - 14;
  return ticks.map((tick) => (isInside(plot.valToPos(tick, "x")) ? show(tick) : ""));
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
