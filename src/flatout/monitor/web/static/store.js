// The figures of one run: times, and a column for each figure, in order of time.  A page may stay open for
// weeks, so the older half is thinned whenever there are too many rows.

const MOST_ROWS = 4000;
const HOLE_S = 5;
const MOST_NOTES = 40;
const CHARTED = new Set([
  "host/cpu_share", "host/memory_used_bytes",
  "job/steps_per_s", "job/loss", "job/allocated_bytes", "job/reserved_bytes",
]);
const CHARTED_OF_GPU = ["utilisation_share", "sm_active_share", "memory_used_bytes", "power_w"];

export const gpuNumber = (gpu) => (gpu.mig_index === undefined ? `${gpu.index}` : `${gpu.index}.${gpu.mig_index}`);

export class Store {
  constructor() {
    this.times = [];
    this.columns = new Map();
    this.sample = null;
    this.verdicts = [];
    this.notes = [];
  }

  takeHistory(message) {
    const times = message.at_s.map((at_s) => message.start_s + at_s);
    if (message.is_whole) {
      this.times = [];
      this.columns = new Map();
      this.notes = [];
    } else if (times.length > 0) {
      this.makeRoom(times[0], times[0]);
    }
    const before = this.times.length;
    this.times.push(...times);
    for (const [path, values] of Object.entries(message.columns)) this.column(path, before).push(...values);
    this.fill();
    for (const [time_s, text] of message.notes) this.note(time_s, text);
    this.takeLatest(message);
  }

  takeSample(message) {
    const { sample } = message;
    this.makeRoom(sample.time_s, sample.time_s - (sample.span_s ?? 0));
    const before = this.times.length;
    this.times.push(sample.time_s);
    for (const [path, value] of figures(sample)) this.column(path, before).push(value);
    this.fill();
    for (const text of sample.notes ?? []) this.note(sample.time_s, text);
    this.takeLatest(message);
    if (this.times.length > MOST_ROWS) this.thin();
  }

  takeLatest(message) {
    if (message.sample !== null) this.sample = message.sample;
    this.verdicts = message.verdicts;
  }

  // Rows from `time_s` on are replaced by what comes; a hole before it becomes a gap in every line.
  makeRoom(time_s, start_s) {
    let keep = this.times.length;
    while (keep > 0 && this.times[keep - 1] >= time_s) keep -= 1;
    this.times.length = keep;
    for (const values of this.columns.values()) values.length = Math.min(values.length, keep);
    const last = this.times[keep - 1];
    if (last !== undefined && start_s - last > HOLE_S) {
      this.times.push((last + start_s) / 2);
      this.fill();
    }
  }

  column(path, length) {
    let values = this.columns.get(path);
    if (values === undefined) {
      values = [];
      this.columns.set(path, values);
    }
    while (values.length < length) values.push(null);
    return values;
  }

  fill() {
    for (const path of this.columns.keys()) this.column(path, this.times.length);
  }

  thin() {
    const half = MOST_ROWS / 2;
    const isKept = (_, row) => row >= half || row % 2 === 0;
    this.times = this.times.filter(isKept);
    for (const [path, values] of this.columns) this.columns.set(path, values.filter(isKept));
  }

  note(time_s, text) {
    if (this.notes.some((known) => known.time_s === time_s && known.text === text)) return;
    this.notes.push({ time_s, text });
    this.notes.splice(0, Math.max(this.notes.length - MOST_NOTES, 0));
  }

  get last_s() {
    return this.times.length > 0 ? this.times[this.times.length - 1] : null;
  }

  has(path) {
    return this.columns.get(path)?.some((value) => value !== null) ?? false;
  }

  latestOf(path) {
    return this.columns.get(path)?.findLast((value) => value !== null) ?? null;
  }

  // The mean of a figure over the last `span_s`, of the rows that know it.
  mean(path, span_s) {
    const values = this.columns.get(path);
    if (values === undefined) return null;
    let sum = 0;
    let num = 0;
    for (let row = values.length - 1; row >= 0 && this.times[row] > this.last_s - span_s; row -= 1) {
      if (values[row] !== null) {
        sum += values[row];
        num += 1;
      }
    }
    return num > 0 ? sum / num : null;
  }
}

function* figures(sample) {
  for (const group of ["host", "job"]) {
    for (const [name, value] of Object.entries(sample[group] ?? {})) {
      const path = `${group}/${name}`;
      if (CHARTED.has(path) && typeof value === "number") yield [path, value];
    }
  }
  for (const gpu of sample.gpus ?? []) {
    for (const name of CHARTED_OF_GPU) {
      if (typeof gpu[name] === "number") yield [`gpu/${gpuNumber(gpu)}/${name}`, gpu[name]];
    }
  }
  for (const kind of ["phases", "device_phases"]) {
    for (const [phase, value] of Object.entries(sample.job?.[kind] ?? {})) yield [`job/${kind}/${phase}`, value];
  }
}
