//! `--profile`: which op takes how long, for a prompt and for the tokens after it.

use crate::failure::{Failure, Outcome};
use ferrum_engine::Session;
use ferrum_kernels::{Span, chrome_trace};
use ferrum_models::Readback;
use ferrum_types::TokenId;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;
use std::time::Instant;

/// Tokens that are profiled after the prompt, at most: a trace of more is hard to look at.
const TOKENS: usize = 16;

/// The time of one op over some steps.
struct OpTime {
    name: &'static str,
    calls: usize,
    seconds: f64,
}

/// Some steps, op by op.
struct Stretch {
    /// All of the time, that between ops too.
    seconds: f64,
    ops: Vec<OpTime>,
}

impl Stretch {
    fn new(seconds: f64, spans: &[Span]) -> Self {
        let mut ops: Vec<OpTime> = Vec::new();
        for span in spans {
            let at = ops.iter().position(|op| op.name == span.name);
            let at = at.unwrap_or_else(|| {
                let (name, calls, seconds) = (span.name, 0, 0.0);
                ops.push(OpTime {
                    name,
                    calls,
                    seconds,
                });
                ops.len() - 1
            });
            ops[at].calls += 1;
            ops[at].seconds += span.duration_ns as f64 / 1e9;
        }
        ops.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Self { seconds, ops }
    }

    fn text(&self, title: &str) -> String {
        let mut text = format!("\n{title}: {:.2} ms\n", 1e3 * self.seconds);
        let mut line = |name: &str, calls: &str, seconds: f64| {
            let share = 100.0 * seconds / self.seconds;
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "  {name:<14} {calls:>6} {:>10.3} ms {share:>5.1} %",
                1e3 * seconds
            );
        };
        let mut rest = self.seconds;
        for op in &self.ops {
            line(op.name, &format!("{}×", op.calls), op.seconds);
            rest -= op.seconds;
        }
        line("between ops", "", rest.max(0.0));
        text
    }

    fn json(&self) -> Value {
        let op = |op: &OpTime| json!({"name": op.name, "calls": op.calls, "seconds": op.seconds});
        let ops: Vec<_> = self.ops.iter().map(op).collect();
        json!({"seconds": self.seconds, "ops": ops})
    }
}

/// A prompt and some tokens after it.
pub(super) struct Profile {
    prompt_len: usize,
    tokens: usize,
    prefill: Stretch,
    decode: Stretch,
}

impl Profile {
    /// Measures, and writes the trace to `path`.
    pub(super) fn measure(
        session: &mut Session,
        prompt: &[TokenId],
        gen_len: usize,
        path: &Path,
    ) -> Outcome<Self> {
        let tokens = gen_len.min(TOKENS);
        super::forget(session, prompt)?;
        session.take_spans()?;
        let started = Instant::now();
        session.prefill(prompt, Readback::GREEDY)?;
        let mut next = session.token().unwrap_or(0);
        let prefill_s = started.elapsed().as_secs_f64();
        let mut spans = session.take_spans()?;
        let prefill = Stretch::new(prefill_s, &spans);
        let started = Instant::now();
        for _ in 0..tokens {
            session.decode(next, Readback::GREEDY)?;
            next = session.token().unwrap_or(0);
        }
        let decode_s = started.elapsed().as_secs_f64();
        let after = session.take_spans()?;
        let decode = Stretch::new(decode_s, &after);
        spans.extend(after);
        std::fs::write(path, chrome_trace(&spans))
            .map_err(|e| Failure::new(format!("cannot write {}: {e}", path.display())))?;
        Ok(Self {
            prompt_len: prompt.len(),
            tokens,
            prefill,
            decode,
        })
    }

    pub(super) fn text(&self) -> String {
        let (prompt, tokens) = (self.prompt_len, self.tokens);
        self.prefill.text(&format!("prompt of {prompt} tokens"))
            + &self.decode.text(&format!("{tokens} tokens after it"))
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_len,
            "generated_tokens": self.tokens,
            "prefill": self.prefill.json(),
            "decode": self.decode.json(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_are_summed_and_the_longest_comes_first() {
        let span = |name, duration_ns| Span {
            name,
            start_ns: 0,
            duration_ns,
        };
        let spans = [span("norm", 1000), span("gemm", 5000), span("norm", 2000)];
        let stretch = Stretch::new(10e-6, &spans);
        insta::assert_snapshot!(stretch.text("2 tokens"), @r"

        2 tokens: 0.01 ms
          gemm               1×      0.005 ms  50.0 %
          norm               2×      0.003 ms  30.0 %
          between ops                0.002 ms  20.0 %
        ");
        assert_eq!(stretch.json()["ops"][1]["calls"], 2);
    }
}
