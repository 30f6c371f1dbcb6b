//! The cache of packed weights: where it is, and what is said of it.

use crate::args::WeightCacheArgs;
use crate::failure::{Failure, Outcome};
use crate::hub;
use crate::ui::{self, human_bytes};
use ferrum_engine::{CacheOutcome, CacheWriter, MemoryShortage};
use ferrum_formats::weight_cache::WeightCache;
use std::path::{Path, PathBuf};

/// The cache that the arguments mean; `None` when there is to be none.
pub(crate) fn of(args: &WeightCacheArgs) -> Option<WeightCache> {
    if args.no_weight_cache {
        return None;
    }
    let root = root(args.weight_cache_dir.as_deref())?;
    let limit = args.weight_cache_size.map(|gib| u64::from(gib) << 30);
    Some(WeightCache::new(root, limit))
}

/// The cache in the folder of a flag, or in the usual one.
pub(crate) fn in_folder(flag: Option<&Path>) -> Outcome<WeightCache> {
    let none = || {
        Failure::new(
            "there is no folder for weights: no home is known\nhint: give --weight-cache-dir",
        )
    };
    let root = root(flag).ok_or_else(none)?;
    Ok(WeightCache::new(root, None))
}

fn root(flag: Option<&Path>) -> Option<PathBuf> {
    let usual = || Some(hub::user_cache()?.join("ferrum").join("packed"));
    flag.map(Path::to_owned).or_else(usual)
}

/// Tells what the cache did for a model.
pub(crate) fn tell(kept: &CacheWriter) {
    if let Some(fault) = kept.damaged() {
        ui::say(&format!(
            "warning: {fault}\nnote: the weights were packed anew"
        ));
    }
    match kept.outcome() {
        CacheOutcome::Hit => ui::detail("note: the packed weights come from the cache"),
        CacheOutcome::Skipped(reason) => {
            ui::detail(&format!("note: the packed weights are not kept: {reason}"));
        }
        CacheOutcome::Written { bytes } => ui::detail(&format!(
            "note: the packed weights ({}) are written to the cache",
            human_bytes(*bytes)
        )),
        CacheOutcome::Streamed { bytes } => ui::detail(&format!(
            "note: the packed weights ({}) were written to the cache",
            human_bytes(*bytes)
        )),
    }
}

/// Says that memory has no room for a model, and what comes of it. Said before the load, which may take long, or be the end of
/// the process.
pub(crate) fn tell_shortage(shortage: &MemoryShortage) {
    let (needed, free) = (human_bytes(shortage.needed), human_bytes(shortage.free));
    let has = format!("the model takes {needed}, and {free} of memory are free");
    match &shortage.why_in_memory {
        None => ui::say_once(&format!(
            "note: {has}: its weights are packed into the cache and read from there when they are used"
        )),
        Some(reason) => ui::say(&format!(
            "warning: {has}: all weights are loaded into memory nevertheless, because {reason}"
        )),
    }
}

/// Writes what is not written yet, and says so.
pub(crate) fn finish(mut kept: CacheWriter) {
    if !kept.is_writing() {
        return;
    }
    if let CacheOutcome::Written { bytes } = kept.outcome() {
        ui::say(&format!(
            "note: keeping the packed weights ({}) so that the next start is quick; Ctrl-C gives that up",
            human_bytes(*bytes)
        ));
    }
    kept.finish();
}

/// What a report says of where weights came from.
pub(crate) fn word(kept: &CacheWriter) -> &'static str {
    match kept.outcome() {
        CacheOutcome::Hit => "cache",
        CacheOutcome::Written { .. } | CacheOutcome::Streamed { .. } | CacheOutcome::Skipped(_) => {
            "packed"
        }
    }
}
