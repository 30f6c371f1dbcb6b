//! `ferrum cache`: the packed weights that are kept between starts.

use crate::args::{CacheClearArgs, CacheListArgs, HubArgs};
use crate::failure::Outcome;
use crate::ui::{human_bytes, say, show, show_json};
use crate::{hub, weight_cache};
use ferrum_formats::hub::DownloadScope;
use ferrum_formats::weight_cache::{CachedWeights, WeightState};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

pub(crate) fn list(args: &CacheListArgs) -> Outcome {
    let cache = weight_cache::in_folder(args.weight_cache_dir.as_deref())?;
    let entries = cache.entries()?;
    let root = cache.root().display().to_string();
    if args.json {
        let entries: Vec<_> = entries.iter().map(as_json).collect();
        return show_json(&json!({"cache": root, "weights": entries}));
    }
    if entries.is_empty() {
        say(&format!("there are no packed weights in {root}"));
        return Ok(());
    }
    let names: Vec<_> = entries.iter().map(name).collect();
    let width = names.iter().map(|name| name.chars().count()).max();
    let width = width.unwrap_or(0).max("MODEL".len());
    let mut text = format!(
        "{:<width$}  {:>10}  {:>14}  STATE\n",
        "MODEL", "SIZE", "USED"
    );
    for (entry, name) in entries.iter().zip(names) {
        let state = match entry.state {
            WeightState::Current => "current",
            WeightState::Outdated => "outdated: the model is gone or was changed",
            WeightState::Unreadable => "unreadable: damaged, or of another version",
        };
        let (size, used) = (human_bytes(entry.bytes), ago(entry.used));
        let _ = writeln!(text, "{name:<width$}  {size:>10}  {used:>14}  {state}");
    }
    show(&text)
}

/// The first file of the model.
fn name(entry: &CachedWeights) -> String {
    let mut files = entry.files();
    let first = files.next().map(|path| path.display().to_string());
    let more = match files.count() {
        0 => String::new(),
        n => format!(" (+{n})"),
    };
    first.map_or_else(|| "?".into(), |first| format!("{first}{more}"))
}

/// How long ago something was, in one unit.
fn ago(time: SystemTime) -> String {
    let seconds = time.elapsed().map_or(0, |since| since.as_secs());
    let (n, unit) = match seconds {
        0..60 => return "now".into(),
        60..3600 => (seconds / 60, "minute"),
        3600..86400 => (seconds / 3600, "hour"),
        _ => (seconds / 86400, "day"),
    };
    let plural = if n == 1 { "" } else { "s" };
    format!("{n} {unit}{plural} ago")
}

fn as_json(entry: &CachedWeights) -> Value {
    let used = entry.used.duration_since(UNIX_EPOCH).ok();
    let files: Vec<_> = entry
        .files()
        .map(|path| path.display().to_string())
        .collect();
    json!({
        "path": entry.path.display().to_string(),
        "bytes": entry.bytes,
        "used": used.map(|since| since.as_secs()),
        "state": entry.state,
        "layout": entry.layout(),
        "files": files,
    })
}

pub(crate) fn clear(args: &CacheClearArgs) -> Outcome {
    let cache = weight_cache::in_folder(args.weight_cache_dir.as_deref())?;
    let hub = HubArgs {
        cache_dir: args.cache_dir.clone(),
        // A model that is to be forgotten is not fetched for it.
        offline: true,
        ..HubArgs::default()
    };
    let model = args.model.as_deref();
    let model = model.map(|model| hub::locate(model, &hub, DownloadScope::Model));
    let (count, bytes) = cache.clear(model.transpose()?.as_deref())?;
    let plural = if count == 1 { "" } else { "s" };
    say(&format!(
        "removed {count} file{plural} ({})",
        human_bytes(bytes)
    ));
    Ok(())
}
