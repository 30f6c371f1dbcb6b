//! `ferrum bench serve`: a server under load, as its clients meet it.
//!
//! Requests are planned from a seed: which words, how many tokens, when. They go out either so that a number
//! of them is always open, or at the times of a Poisson process, whatever the server makes of it. Times are
//! taken where bytes arrive.

mod report;
mod target;
mod workload;

use crate::args::BenchServeArgs;
use crate::failure::{Failure, Outcome};
use crate::input;
use crate::ui::{Progress, say, show, show_json};
use report::Report;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;
use target::{RequestFailure, RequestTiming, Target};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use workload::Plan;

/// Default number of requests that are open at once.
const CONCURRENCY: u16 = 16;

type Told = UnboundedSender<Result<RequestTiming, RequestFailure>>;

pub(super) fn serve(args: &BenchServeArgs) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let report = runtime.block_on(measure(args))?;
    if args.json {
        show_json(&report.json())?;
    } else {
        show(&report.text())?;
    }
    match report.completed() {
        0 => Err(Failure::new("no request was answered")),
        _ => Ok(()),
    }
}

async fn measure(args: &BenchServeArgs) -> Outcome<Report> {
    let key = args
        .api_key_file
        .as_deref()
        .map(input::read_json_text)
        .transpose()?;
    let key = key
        .as_deref()
        .and_then(|text| text.lines().map(str::trim).find(|line| !line.is_empty()));
    let mut target = Target::new(&args.url, key, args.endpoint)?;
    target.choose_model(args.model.as_deref()).await?;
    let token_estimate = target.warm_up().await?;
    if token_estimate.is_none() {
        say("note: the server counts no tokens, so prompts have about as many as asked for");
    }
    let plan = Plan::new(args, token_estimate.unwrap_or_default());
    let target = Arc::new(target);
    let (tell, mut told) = unbounded_channel();
    let started = Instant::now();
    match args.rate {
        Some(rate) => at_rate(&target, plan, rate, tell),
        None => at_once(
            &target,
            plan,
            args.concurrency.unwrap_or(CONCURRENCY),
            &tell,
        ),
    }
    let mut bar = Progress::count("requests");
    let mut results = Vec::new();
    while results.len() < args.requests as usize {
        // The senders are gone only when all results have been told.
        let Some(result) = told.recv().await else {
            break;
        };
        results.push(result);
        bar.set(results.len() as u64, args.requests.into());
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(Report::new(args, &target, seconds, results))
}

/// Keeps `concurrency` requests open.
fn at_once(target: &Arc<Target>, plan: Plan, concurrency: u16, tell: &Told) {
    let plan = Arc::new((plan, AtomicU32::new(0)));
    for _ in 0..concurrency {
        let (target, plan, tell) = (Arc::clone(target), Arc::clone(&plan), tell.clone());
        tokio::spawn(async move {
            let (plan, next) = &*plan;
            while let Some(asked) = plan.request(next.fetch_add(1, Ordering::Relaxed)) {
                if tell.send(target.send(&asked).await).is_err() {
                    return;
                }
            }
        });
    }
}

/// Sends each request when its time has come.
fn at_rate(target: &Arc<Target>, plan: Plan, rate: f64, tell: Told) {
    let target = Arc::clone(target);
    tokio::spawn(async move {
        let started = tokio::time::Instant::now();
        let arrivals = plan.arrivals(rate);
        for (i, after) in (0..).zip(arrivals) {
            let Some(asked) = plan.request(i) else {
                return;
            };
            tokio::time::sleep_until(started + after).await;
            let (target, tell) = (Arc::clone(&target), tell.clone());
            // Without a receiver, the result is not needed.
            tokio::spawn(async move { drop(tell.send(target.send(&asked).await)) });
        }
    });
}
