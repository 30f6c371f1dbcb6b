//! What a run of the suite found: one entry for each case, counted by op and dtype.

use serde::Serialize;
use std::fmt::Write;

/// What became of a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The result is within the tolerance of its class.
    Passed {
        /// Normalised squared error, the worst of the case's outputs; 0 where equality is asked for.
        nmse: f64,
    },
    /// The result is wrong, or the backend failed or panicked; the reason.
    Failed(String),
    /// The case did not run; the reason. Never counted as passed.
    Skipped(String),
}

/// One case of one backend, flat, for machines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Backend as in `--backend`.
    pub backend: String,
    /// Op of the contract.
    pub op: &'static str,
    /// Element type of what the op works on: of the weight, of the cache, or of activations.
    pub dtype: &'static str,
    /// Shape and values.
    pub name: String,
    /// `passed`, `failed` or `skipped`.
    pub outcome: &'static str,
    /// Error of a case that passed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nmse: Option<f64>,
    /// Why a case failed or was skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The outcomes of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    backend: String,
    entries: Vec<Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    op: &'static str,
    dtype: &'static str,
    name: String,
    outcome: Outcome,
}

/// How many cases passed, failed and were skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Passed.
    pub passed: usize,
    /// Failed.
    pub failed: usize,
    /// Skipped.
    pub skipped: usize,
}

impl Counts {
    fn add(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Passed { .. } => self.passed += 1,
            Outcome::Failed(_) => self.failed += 1,
            Outcome::Skipped(_) => self.skipped += 1,
        }
    }
}

/// A line of the table.
struct Group<'a> {
    op: &'static str,
    dtype: &'static str,
    counts: Counts,
    worst: f64,
    skip_reason: Option<&'a str>,
}

impl Report {
    /// An empty report on the backend of this name.
    pub fn new(backend: impl Into<String>) -> Self {
        Report {
            backend: backend.into(),
            entries: Vec::new(),
        }
    }

    /// Adds a case.
    pub fn add(&mut self, op: &'static str, dtype: &'static str, name: String, outcome: Outcome) {
        self.entries.push(Entry {
            op,
            dtype,
            name,
            outcome,
        });
    }

    /// All cases together.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for entry in &self.entries {
            counts.add(&entry.outcome);
        }
        counts
    }

    /// Every case, in the order in which it ran.
    pub fn rows(&self) -> impl Iterator<Item = Row> + '_ {
        self.entries.iter().map(|entry| {
            let (outcome, nmse, reason) = match &entry.outcome {
                Outcome::Passed { nmse } => ("passed", Some(*nmse), None),
                Outcome::Failed(reason) => ("failed", None, Some(reason.clone())),
                Outcome::Skipped(reason) => ("skipped", None, Some(reason.clone())),
            };
            Row {
                backend: self.backend.clone(),
                op: entry.op,
                dtype: entry.dtype,
                name: entry.name.clone(),
                outcome,
                nmse,
                reason,
            }
        })
    }

    /// One line for each failed case: where, and why.
    pub fn failures(&self) -> Vec<String> {
        let failed = self.entries.iter().filter_map(|entry| {
            let Outcome::Failed(reason) = &entry.outcome else {
                return None;
            };
            let Entry {
                op, dtype, name, ..
            } = entry;
            Some(format!("{op} {dtype} {name}: {reason}"))
        });
        failed.collect()
    }

    /// The support matrix as text: a line for each op and dtype with its counts, its worst error
    /// and why cases were skipped, then the failed cases, then the totals.
    pub fn table(&self) -> String {
        let groups = self.groups();
        let width = |title: &str, of: fn(&Group<'_>) -> usize| {
            groups.iter().map(of).fold(title.len(), usize::max)
        };
        let op_width = width("op", |group| group.op.len());
        let dtype_width = width("dtype", |group| group.dtype.len());
        let mut out = format!(
            "{:op_width$}  {:dtype_width$}  passed  failed  skipped  worst nmse\n",
            "op", "dtype"
        );
        for group in &groups {
            let Counts {
                passed,
                failed,
                skipped,
            } = group.counts;
            let worst = if passed == 0 {
                "-".to_owned()
            } else {
                format!("{:.1e}", group.worst)
            };
            let reason = group.skip_reason.unwrap_or("");
            let line = format!(
                "{:op_width$}  {:dtype_width$}  {passed:>6}  {failed:>6}  {skipped:>7}  {worst:>10}  {reason}",
                group.op, group.dtype
            );
            out.push_str(line.trim_end());
            out.push('\n');
        }
        for failure in self.failures() {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "failed: {failure}");
        }
        let Counts {
            passed,
            failed,
            skipped,
        } = self.counts();
        let _ = writeln!(out, "{passed} passed, {failed} failed, {skipped} skipped");
        out
    }

    /// Entries by op and dtype, in the order of each op's first case, then of its dtypes'.
    fn groups(&self) -> Vec<Group<'_>> {
        let mut ops: Vec<&'static str> = Vec::new();
        for entry in &self.entries {
            if !ops.contains(&entry.op) {
                ops.push(entry.op);
            }
        }
        let mut entries: Vec<&Entry> = self.entries.iter().collect();
        entries.sort_by_key(|entry| ops.iter().position(|&op| op == entry.op));
        let mut groups: Vec<Group<'_>> = Vec::new();
        for entry in entries {
            let same = |group: &Group<'_>| group.op == entry.op && group.dtype == entry.dtype;
            let at = groups.iter().position(same).unwrap_or_else(|| {
                groups.push(Group {
                    op: entry.op,
                    dtype: entry.dtype,
                    counts: Counts::default(),
                    worst: 0.0,
                    skip_reason: None,
                });
                groups.len() - 1
            });
            let group = &mut groups[at];
            group.counts.add(&entry.outcome);
            match &entry.outcome {
                Outcome::Passed { nmse } => group.worst = group.worst.max(*nmse),
                Outcome::Skipped(reason) => {
                    group
                        .skip_reason
                        .get_or_insert(reason.lines().next().unwrap_or(""));
                }
                Outcome::Failed(_) => {}
            }
        }
        groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::new("cpu");
        report.add(
            "gemm",
            "bf16",
            "1 × 2 × 3".into(),
            Outcome::Passed { nmse: 2e-9 },
        );
        report.add(
            "gemm",
            "bf16",
            "4 × 5 × 6".into(),
            Outcome::Failed("out[3] is NaN".into()),
        );
        report.add(
            "fused_silu_mul_split",
            "f32",
            "a".into(),
            Outcome::Skipped("no device".into()),
        );
        report
    }

    #[test]
    fn table_counts_by_op_and_dtype() {
        let expected = "\
op                    dtype  passed  failed  skipped  worst nmse
gemm                  bf16        1       1        0      2.0e-9
fused_silu_mul_split  f32         0       0        1           -  no device
failed: gemm bf16 4 × 5 × 6: out[3] is NaN
1 passed, 1 failed, 1 skipped
";
        assert_eq!(report().table(), expected);
    }

    #[test]
    fn rows_carry_what_belongs_to_their_outcome() {
        let rows: Vec<Row> = report().rows().collect();
        assert_eq!(rows.len(), 3);
        assert_eq!((rows[0].outcome, rows[0].nmse), ("passed", Some(2e-9)));
        assert_eq!(rows[0].reason, None);
        assert_eq!(rows[1].reason.as_deref(), Some("out[3] is NaN"));
        assert_eq!((rows[2].outcome, rows[2].nmse), ("skipped", None));
    }
}
