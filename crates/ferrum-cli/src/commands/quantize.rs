//! `ferrum quantize`: a GGUF file with smaller weights from a model in floats.

use crate::args::QuantizeArgs;
use crate::failure::{Failure, Outcome};
use crate::load_model;
use crate::ui::{Progress, human_bytes, say, show, show_json};
use ferrum_formats::{Imatrix, ModelSource};
use ferrum_models::quantize::{Plan, QuantizeOptions};
use ferrum_types::GgufQuantType;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// What shells expect of a command that Ctrl-C has ended.
const INTERRUPTED: i32 = 130;

pub(crate) fn quantize(args: &QuantizeArgs) -> Outcome {
    let source = load_model::source(&args.source, &args.hub)?;
    if !args.dry_run {
        check_destination(&source, &args.destination, args.force)?;
    }
    let imatrix = args.imatrix.as_ref().map(Imatrix::open).transpose()?;
    let threads = args.threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, usize::from),
        usize::from,
    );
    let options = QuantizeOptions {
        recipe: args.recipe,
        imatrix: imatrix.as_ref(),
        search: args.search,
        threads,
        requantize: args.requantize,
    };
    let plan = Plan::new(&source, options)?;
    remarks(&plan, imatrix.as_ref());
    if args.dry_run {
        return match args.json {
            true => show_json(&as_json(args, &plan)),
            false => show(&table(&plan)),
        };
    }
    write(&plan, &args.destination)?;
    say(&summary(args, &plan));
    match args.json {
        true => show_json(&as_json(args, &plan)),
        false => Ok(()),
    }
}

/// Refuses to write over the source, and over anything else unless that is asked for.
fn check_destination(source: &ModelSource, destination: &Path, force: bool) -> Outcome {
    let path = destination.display();
    let refuse = |reason: &str| Err(Failure::new(format!("{path}: {reason}")));
    if destination.is_dir() {
        return refuse(
            "is a folder, expected the name of a new file\nhint: add a name, such as model.gguf",
        );
    }
    let Ok(there) = destination.canonicalize() else {
        return Ok(());
    };
    let belongs_to_source = match source {
        ModelSource::Gguf(gguf) => gguf.path().canonicalize().is_ok_and(|file| file == there),
        // Anything but a GGUF file in the folder may be part of the model.
        ModelSource::Hf(folder) => {
            let inside = folder.dir.canonicalize().ok();
            inside.as_deref() == there.parent() && there.extension().is_none_or(|e| e != "gguf")
        }
    };
    if belongs_to_source {
        return refuse("is the source itself, expected another file");
    }
    // A device or a pipe would be replaced by the file rather than written to.
    if !there.is_file() {
        return refuse("is no plain file, expected the name of a new file");
    }
    match force {
        true => Ok(()),
        false => refuse("there is such a file already\nhint: choose another name or give --force"),
    }
}

/// Writes a temporary file beside the destination, and then renames it, so that the destination never holds half a
/// model.
fn write(plan: &Plan<'_>, destination: &Path) -> Outcome {
    // Of a link, the file that it leads to is replaced, and not the link.
    let target = destination.canonicalize();
    let target = target.unwrap_or_else(|_| destination.to_path_buf());
    let failed = |e: std::io::Error| Failure::new(format!("{}: {e}", destination.display()));
    let temp = TempFile::new(&target).map_err(failed)?;
    let file = File::create_new(&temp.path).map_err(failed)?;
    let mut bar = Progress::bytes("quantising");
    let out = BufWriter::with_capacity(1 << 20, file);
    let mut out = plan.write(destination, out, &mut |done, total| bar.set(done, total))?;
    out.flush().map_err(failed)?;
    out.get_ref().sync_all().map_err(failed)?;
    std::fs::rename(&temp.path, &target).map_err(failed)
}

/// A file that goes away with whatever ends the command before it has its name.
struct TempFile {
    path: PathBuf,
}

impl TempFile {
    fn new(target: &Path) -> std::io::Result<Self> {
        let path = temp_path(target);
        let orphan = path.clone();
        // Many gigabytes under a hidden name are nothing to leave behind on Ctrl-C either.
        let stopped = move || {
            drop(std::fs::remove_file(&orphan));
            std::process::exit(INTERRUPTED);
        };
        ctrlc::set_handler(stopped).map_err(std::io::Error::other)?;
        Ok(TempFile { path })
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        // After the renaming there is none. Errors of removing a temporary file are ignored.
        drop(std::fs::remove_file(&self.path));
    }
}

fn temp_path(destination: &Path) -> PathBuf {
    let name = destination.file_name().unwrap_or_default();
    let mut temp = std::ffi::OsString::from(".");
    temp.push(name);
    temp.push(format!(".{}.part", std::process::id()));
    destination.with_file_name(temp)
}

fn remarks(plan: &Plan<'_>, imatrix: Option<&Imatrix>) {
    let fallbacks = plan.tensors.iter().filter(|tensor| tensor.fallback).count();
    if fallbacks > 0 {
        say(&format!(
            "note: {fallbacks} tensors take another type, as their rows are no multiple of its block"
        ));
    }
    if let Some(imatrix) = imatrix {
        let quantized = plan.tensors.iter().filter(|t| t.ty.is_quantized());
        let without = quantized.clone().filter(|t| !t.weighted).count();
        if without > 0 {
            say(&format!(
                "note: {without} of {} quantised tensors have no importance in {}",
                quantized.count(),
                imatrix.path.display()
            ));
        }
    }
}

/// Tensors, numbers and bytes of each type, those of most bytes first.
fn by_type(plan: &Plan<'_>) -> Vec<(GgufQuantType, usize, u64, u64)> {
    let mut types: BTreeMap<GgufQuantType, (usize, u64, u64)> = BTreeMap::new();
    for tensor in &plan.tensors {
        let entry = types.entry(tensor.ty).or_default();
        entry.0 += 1;
        entry.1 += tensor.elements() as u64;
        entry.2 += tensor.bytes as u64;
    }
    let mut list: Vec<_> = types
        .into_iter()
        .map(|(ty, (n, e, b))| (ty, n, e, b))
        .collect();
    list.sort_by_key(|row| std::cmp::Reverse(row.3));
    list
}

fn bits_per_weight(plan: &Plan<'_>) -> f64 {
    8.0 * plan.total_bytes() as f64 / plan.total_elements().max(1) as f64
}

fn summary(args: &QuantizeArgs, plan: &Plan<'_>) -> String {
    let types: Vec<_> = by_type(plan)
        .into_iter()
        .map(|(ty, n, _, bytes)| format!("{n} {ty} ({})", human_bytes(bytes)))
        .collect();
    format!(
        "{}: {}, {:.2} bits per weight: {}",
        args.destination.display(),
        human_bytes(plan.total_bytes()),
        bits_per_weight(plan),
        types.join(", ")
    )
}

/// One line for each tensor, and the sum.
fn table(plan: &Plan<'_>) -> String {
    let width = plan.tensors.iter().map(|t| t.name.chars().count()).max();
    let width = width.unwrap_or(0);
    let mut text = String::new();
    for tensor in &plan.tensors {
        let shape: Vec<_> = tensor.shape.iter().map(usize::to_string).collect();
        let from = tensor.from.map_or("-", GgufQuantType::name);
        let _ = writeln!(
            text,
            "{:<width$}  {:>16}  {from:>5} → {:<6} {:>10}{}",
            tensor.name.escape_debug().to_string(),
            shape.join(" × "),
            tensor.ty,
            human_bytes(tensor.bytes as u64),
            if tensor.fallback { "  (fallback)" } else { "" },
        );
    }
    let _ = writeln!(
        text,
        "{} tensors, {}, {:.2} bits per weight",
        plan.tensors.len(),
        human_bytes(plan.total_bytes()),
        bits_per_weight(plan)
    );
    text
}

fn as_json(args: &QuantizeArgs, plan: &Plan<'_>) -> Value {
    let types: Vec<_> = by_type(plan)
        .into_iter()
        .map(|(ty, n, elements, bytes)| {
            json!({"type": ty.name(), "tensors": n, "elements": elements, "bytes": bytes})
        })
        .collect();
    let tensors: Vec<_> = plan
        .tensors
        .iter()
        .map(|tensor| {
            json!({
                "name": tensor.name,
                "shape": tensor.shape,
                "from": tensor.from.map(GgufQuantType::name),
                "type": tensor.ty.name(),
                "bytes": tensor.bytes,
                "fallback": tensor.fallback,
                "importance": tensor.weighted,
            })
        })
        .collect();
    json!({
        "file": args.destination.display().to_string(),
        "recipe": args.recipe.name,
        "search": args.search.name(),
        "bytes": plan.total_bytes(),
        "bits_per_weight": bits_per_weight(plan),
        "types": types,
        "tensors": tensors,
    })
}
