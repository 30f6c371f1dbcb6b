//! `ferrum verify ops`: every op of a backend against its meaning.

use crate::args::VerifyOpsArgs;
use crate::failure::{Failure, Outcome};
use crate::ui::{show, show_json};
use ferrum_conformance::Filter;
use ferrum_engine::BackendDispatch;

pub(crate) fn ops(args: &VerifyOpsArgs) -> Outcome {
    let dispatch = BackendDispatch::from_kind(args.device.backend, args.device.options())?;
    let filter = Filter::new(args.filter.as_str());
    let report = match &dispatch {
        BackendDispatch::Cpu(device) => ferrum_conformance::run_cpu(device, &filter),
        BackendDispatch::Cuda(device) => ferrum_conformance::run_cuda(device, &filter),
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

/// What the suite has, for whoever asked for what it has not.
fn nothing_matches(filter: &str) -> Failure {
    let ops = ferrum_conformance::ops().join(", ");
    Failure::new(format!(
        "no case has \"{filter}\" in its op, dtype or name\nhint: the ops are {ops}"
    ))
}
