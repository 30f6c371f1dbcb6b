//! `ferrum devices`.

use crate::args::DevicesArgs;
use crate::failure::Outcome;
use crate::ui::{human_bytes, show, show_json};
use ferrum_engine::list_devices;
use ferrum_kernels::DeviceMemory;
use serde_json::json;

pub(crate) fn devices(args: &DevicesArgs) -> Outcome {
    let devices = list_devices();
    if args.json {
        let rows: Vec<_> = devices
            .iter()
            .map(|d| {
                json!({
                    "backend": d.backend,
                    "device": d.ordinal,
                    "name": d.name,
                    "detail": d.detail,
                    "software": d.software,
                    "memory_bytes": d.memory.map(|memory| memory.total),
                    "free_memory_bytes": d.memory.map(|memory| memory.free),
                })
            })
            .collect();
        return show_json(&rows);
    }
    let mut text = String::new();
    for d in &devices {
        let memory = d
            .memory
            .map_or(String::new(), |DeviceMemory { free, total }| {
                format!(", {} of {} free", human_bytes(free), human_bytes(total))
            });
        let software = if d.software { ", software" } else { "" };
        let (backend, name, detail) = (d.backend, &d.name, &d.detail);
        text += &format!(
            "{backend:<10} {:<3} {name} ({detail}{memory}{software})\n",
            d.ordinal
        );
    }
    show(&text)
}
