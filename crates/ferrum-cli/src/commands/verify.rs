//! `ferrum verify`: every op of a backend against its meaning, and a model's layers against another computation of them.

use crate::args::{VerifyModelArgs, VerifyOpsArgs};
use crate::failure::{Failure, Outcome};
use crate::load_model;
use crate::ui::{Progress, show, show_json};
use ferrum_conformance::Filter;
use ferrum_engine::{BackendDispatch, BackendKind, BackendOptions, Comparison, Difference, Trace};
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_models::Model;
use ferrum_types::TokenId;
use serde_json::{Value, json};
use std::path::Path;

/// What a layer's difference may be by default: where all numbers are floats; where some are quantised or a device rounds
/// activations; and where experts are chosen by such numbers, as two that are nearly as likely may then change places.
const TOLERANCES: [f64; 3] = [1e-3, 0.1, 0.2];

/// The file of stored activations in a folder.
const ACTIVATIONS: &str = "activations.safetensors";

pub(crate) fn ops(args: &VerifyOpsArgs) -> Outcome {
    let dispatch = BackendDispatch::from_kind(args.device.backend, args.device.options())?;
    let filter = Filter::new(args.filter.as_str());
    let report = match &dispatch {
        BackendDispatch::Cpu(device) => ferrum_conformance::run_cpu(device, &filter),
        #[cfg(feature = "cuda")]
        BackendDispatch::Cuda(device) => ferrum_conformance::run_cuda(device, &filter),
        #[cfg(feature = "cuda")]
        BackendDispatch::CudaF16(device) => ferrum_conformance::run_cuda(device, &filter),
        #[cfg(feature = "gpu")]
        BackendDispatch::Gpu(device) => ferrum_conformance::run_gpu(device, &filter),
        BackendDispatch::Reference(_) => ferrum_conformance::run_reference(&filter),
    };
    if report.rows().next().is_none() {
        return Err(nothing_matches(&args.filter));
    }
    if args.json {
        show_json(&report.rows().collect::<Vec<_>>())?;
    } else {
        show(&report.table())?;
    }
    match report.counts().failed {
        0 => Ok(()),
        n => Err(Failure::new(format!(
            "{n} cases failed on {}",
            dispatch.info().backend
        ))),
    }
}

/// The error for a filter that matches no op, with the ops that there are.
fn nothing_matches(filter: &str) -> Failure {
    let ops = ferrum_conformance::ops().join(", ");
    Failure::new(format!(
        "no case has \"{filter}\" in its op, dtype or name\nhint: the ops are {ops}"
    ))
}

pub(crate) fn model(args: &VerifyModelArgs) -> Outcome {
    let model = load_model::model(args.model.path(), &args.hub)?;
    let stored = args.against.as_deref().map(stored).transpose()?;
    let tokens = match &stored {
        Some(stored) => stored.tokens.clone(),
        None if args.tokens.is_empty() => {
            load_model::tokenizer_of(&model)?.encode(&args.prompt, EncodeOptions::WRITTEN)?
        }
        None => args.tokens.clone(),
    };
    load_model::check_tokens(&tokens, model.spec.vocab_size)?;
    if tokens.is_empty() {
        let hint = "hint: --prompt takes a text, --tokens ids";
        return Err(Failure::new(format!(
            "there is no token to compute\n{hint}"
        )));
    }
    let (found, mut rounds) = compute(
        &model,
        (args.device.backend, args.device.options()),
        &tokens,
    )?;
    if let Some(path) = &args.save {
        found.write(path)?;
    }
    let (expected, name) = match (stored, &args.against) {
        (Some(stored), Some(path)) => (stored, path.display().to_string()),
        _ => {
            let options = BackendOptions::default();
            let kind = args.reference;
            let (expected, reference_rounds) = compute(&model, (kind, options), &tokens)?;
            rounds |= reference_rounds;
            (expected, kind.to_string())
        }
    };
    let (tolerance, why) = match args.tolerance {
        Some(tolerance) => (tolerance, String::new()),
        None => default_tolerance(&model, rounds),
    };
    let comparison = found.compare(&expected, tolerance)?;
    match args.json {
        true => show_json(&as_json(&comparison, tokens.len()))?,
        false => show(&(table(&comparison, tokens.len(), &name) + &why))?,
    }
    match (comparison.agrees(), comparison.first_diverging) {
        (true, _) => Ok(()),
        (false, Some(layer)) => Err(Failure::new(format!(
            "layer {layer} is the first that differs from {name} by more than {}",
            comparison.tolerance
        ))),
        (false, None) => Err(Failure::new(format!(
            "no layer differs from {name} by more than {}, but logits do",
            comparison.tolerance
        ))),
    }
}

/// The tolerance for a model, and why it is not the least one, as a line. `rounds`: a device rounds activations.
fn default_tolerance(model: &Model, rounds: bool) -> (f64, String) {
    let integers = model.has_integers();
    if !rounds && !integers {
        return (TOLERANCES[0], String::new());
    }
    let experts = model.spec.experts().is_some();
    let mut reasons = Vec::new();
    if integers {
        reasons.push("weights are quantised");
    }
    if rounds {
        reasons
            .push("this device rounds activations to 16 bits (a CPU with --isa avx512 does not)");
    }
    if experts {
        reasons.push("experts are chosen by such numbers");
    }
    let tolerance = TOLERANCES[1 + usize::from(experts)];
    let reasons = reasons.join("; ");
    (tolerance, format!("tolerance {tolerance}: {reasons}\n"))
}

fn stored(path: &Path) -> Outcome<Trace> {
    let file = match path.is_dir() {
        true => path.join(ACTIVATIONS),
        false => path.to_owned(),
    };
    Ok(Trace::read(&file)?)
}

/// The activations, and whether the device rounds them.
fn compute(
    model: &Model,
    (kind, options): (BackendKind, BackendOptions),
    tokens: &[TokenId],
) -> Outcome<(Trace, bool)> {
    let device = BackendDispatch::for_model(kind, model, options)?;
    let mut bar = Progress::bytes(&format!("loading on {}", device.info().backend));
    let progress = &mut |done, total| bar.set(done, total);
    let rounds = device.rounds_activations(model);
    Ok((Trace::compute(model, device, tokens, progress)?, rounds))
}

fn table(comparison: &Comparison, tokens: usize, name: &str) -> String {
    let row = |what: &str, of: Difference, is_first: bool| {
        let mark = if is_first { "  first to diverge" } else { "" };
        let Difference { max, relative } = of;
        format!("{what:<10} {max:>10.2e} {relative:>10.2e}{mark}")
    };
    let head = [
        format!("{tokens} tokens, against {name}"),
        format!("{:<10} {:>10} {:>10}", "layer", "max", "relative"),
    ];
    let layers = comparison.layers.iter().map(|layer| {
        let is_first = comparison.first_diverging == Some(layer.layer);
        row(&layer.layer.to_string(), layer.difference, is_first)
    });
    let share = 100.0 * comparison.top1;
    let end = [
        row("logits", comparison.logits, false),
        format!(
            "KL {:.2e}, best token the same at {share:.1} % of positions",
            comparison.kl
        ),
        match comparison.agrees() {
            true => format!("agrees: no difference is above {}\n", comparison.tolerance),
            false => format!("diverges: the tolerance is {}\n", comparison.tolerance),
        },
    ];
    let lines: Vec<_> = head.into_iter().chain(layers).chain(end).collect();
    lines.join("\n")
}

fn as_json(comparison: &Comparison, tokens: usize) -> Value {
    let difference = |of: &Difference| json!({"max": of.max, "relative": of.relative});
    let layers = comparison.layers.iter().map(|layer| {
        let Difference { max, relative } = layer.difference;
        json!({"layer": layer.layer, "max": max, "relative": relative})
    });
    json!({
        "tokens": tokens,
        "layers": layers.collect::<Vec<_>>(),
        "logits": difference(&comparison.logits),
        "kl": comparison.kl,
        "top1": comparison.top1,
        "tolerance": comparison.tolerance,
        "first_diverging_layer": comparison.first_diverging,
        "agrees": comparison.agrees(),
    })
}
