// The tables of GPUs and processes.  Rows stay where they are and only their texts change, so that nothing
// jumps under the eye; on a narrow screen style makes a block of each row, with the names of its columns.

import { PALETTE, setText } from "./charts.js";
import * as format from "./format.js";
import { gpuNumber } from "./store.js";

const MOST_PROCESSES = 24;

function state(gpu) {
  if (gpu.lost) return "does not answer";
  return (gpu.throttle_reasons ?? []).join(", ") || "–";
}

const part = (used, total) => (used === undefined || !total ? null : used / total);

const GPU_COLUMNS = [
  ["GPU", (gpu) => gpuNumber(gpu)],
  ["Name", (gpu) => gpu.name ?? format.UNKNOWN],
  ["Utilisation", (gpu) => format.share(gpu.utilisation_share), (gpu) => gpu.utilisation_share ?? null],
  ["SM activity", (gpu) => format.share(gpu.sm_active_share), (gpu) => gpu.sm_active_share ?? null],
  ["Memory", (gpu) => `${format.bytes(gpu.memory_used_bytes)} of ${format.bytes(gpu.memory_total_bytes)}`, (gpu) => part(gpu.memory_used_bytes, gpu.memory_total_bytes)],
  ["Power", (gpu) => `${format.watts(gpu.power_w)} of ${format.watts(gpu.power_limit_w)}`, (gpu) => part(gpu.power_w, gpu.power_limit_w)],
  ["Temperature", (gpu) => format.celsius(gpu.temperature_c)],
  ["SM clock", (gpu) => format.gigahertz(gpu.sm_clock_hz)],
  ["PCIe in", (gpu) => format.bytesPerSecond(gpu.pcie_received_bytes_per_s)],
  ["PCIe out", (gpu) => format.bytesPerSecond(gpu.pcie_sent_bytes_per_s)],
  ["Held down by", state],
];

const PROCESS_COLUMNS = [
  ["Process", (process) => String(process.pid)],
  ["Name", (process) => process.name ?? format.UNKNOWN],
  ["GPU", (process) => (process.gpu_index === undefined ? "–" : process.mig_index === undefined ? `${process.gpu_index}` : `${process.gpu_index}.${process.mig_index}`)],
  ["GPU memory", (process) => format.bytes(process.gpu_memory_bytes)],
  ["SM share", (process) => format.share(process.sm_share)],
  ["CPU cores", (process) => format.cores(process.cpu_cores)],
  ["Memory", (process) => format.bytes(process.memory_bytes)],
];

export function fillGpus(table, gpus, mine) {
  fill(table, GPU_COLUMNS, gpus);
  gpus.forEach((gpu, position) => {
    const row = table.tBodies[0].rows[position];
    row.cells[0].style.setProperty("--colour", `var(${PALETTE[position % PALETTE.length]})`);
    row.classList.toggle("mine", mine === gpu && gpus.length > 1);
    row.classList.toggle("lost", gpu.lost === true);
  });
}

export function fillProcesses(table, processes) {
  const shown = [...processes]
    .sort((a, b) => Number(b.of_job ?? false) - Number(a.of_job ?? false) || (a.gpu_index ?? 99) - (b.gpu_index ?? 99) || a.pid - b.pid)
    .slice(0, MOST_PROCESSES);
  fill(table, PROCESS_COLUMNS, shown);
  shown.forEach((process, position) => table.tBodies[0].rows[position].classList.toggle("mine", process.of_job === true));
}

function fill(table, columns, items) {
  if (table.tHead.rows.length === 0) {
    const row = table.tHead.insertRow();
    for (const [name] of columns) row.append(Object.assign(document.createElement("th"), { textContent: name, scope: "col" }));
  }
  const body = table.tBodies[0];
  while (body.rows.length > items.length) body.deleteRow(-1);
  while (body.rows.length < items.length) {
    const row = body.insertRow();
    for (const [name, , meter] of columns) {
      const cell = row.insertCell();
      cell.dataset.column = name;
      cell.append(document.createElement("span"));
      if (meter !== undefined) cell.append(document.createElement("i"));
    }
  }
  items.forEach((item, position) => {
    columns.forEach(([, text, meter], column) => {
      const cell = body.rows[position].cells[column];
      setText(cell.firstElementChild, text(item));
      if (meter !== undefined) cell.style.setProperty("--part", String(meter(item) ?? 0));
    });
  });
}
