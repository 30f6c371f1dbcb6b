//! What the CUDA tests ask of a report.

use ferrum_conformance::Report;

/// Fails unless cases ran and all of them passed. A case that the backend refuses as unsupported is reported as skipped, which is
/// no answer here: this backend has a kernel for everything that the suite asks, on every device that it opens, and shared memory
/// that does not suffice for one is such a refusal as well.
pub(crate) fn expect_all_passed(report: &Report) {
    let refused = report.rows().filter(|row| row.outcome == "skipped");
    let refused = refused.map(|row| {
        let reason = row.reason.unwrap_or_default();
        format!("{} {} {}: skipped: {reason}", row.op, row.dtype, row.name)
    });
    let wrong: Vec<_> = report.failures().into_iter().chain(refused).collect();
    assert!(
        wrong.is_empty(),
        "{} cases did not pass:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(report.counts().passed > 0, "nothing ran");
}
