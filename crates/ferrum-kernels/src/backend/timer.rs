//! Device-side timing.

use super::Backend;
use ferrum_types::{Error, Result};
use std::fmt::Write;
use std::marker::PhantomData;
use std::time::Instant;

/// A measured span of device time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// What ran.
    pub name: &'static str,
    /// Nanoseconds since the timer was made.
    pub start_ns: u64,
    /// Nanoseconds it took.
    pub duration_ns: u64,
}

/// Measures spans of a context's work where it runs. Spans may nest.
pub trait BackendTimer<B: Backend>: Sized + Send {
    /// A timer for contexts of `device`.
    fn new(device: &B) -> Result<Self>;

    /// Opens a span.
    fn begin(&mut self, ctx: &mut B::Context, name: &'static str) -> Result<()>;

    /// Closes the span opened last.
    ///
    /// # Errors
    /// [`InvalidArgument`](ferrum_types::Error::InvalidArgument) when none is open.
    fn end(&mut self, ctx: &mut B::Context) -> Result<()>;

    /// Synchronises, and takes the closed spans in the order in which they were opened.
    fn take_spans(&mut self, ctx: &mut B::Context) -> Result<Vec<Span>>;
}

/// The host's clock, read when the device has nothing left to do: the timer of a backend that has no
/// clock of its own. On a device that runs later than the host each end of a span waits for it.
#[derive(Debug)]
pub struct HostTimer<B> {
    backend: PhantomData<fn() -> B>,
    origin: Instant,
    /// In order of opening; a span without duration is open.
    spans: Vec<(&'static str, u64, Option<u64>)>,
}

impl<B> HostTimer<B> {
    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl<B: Backend> BackendTimer<B> for HostTimer<B> {
    fn new(_: &B) -> Result<Self> {
        Ok(Self {
            backend: PhantomData,
            origin: Instant::now(),
            spans: Vec::new(),
        })
    }

    fn begin(&mut self, ctx: &mut B::Context, name: &'static str) -> Result<()> {
        B::sync(ctx)?;
        self.spans.push((name, self.now(), None));
        Ok(())
    }

    fn end(&mut self, ctx: &mut B::Context) -> Result<()> {
        B::sync(ctx)?;
        let now = self.now();
        match self.spans.iter_mut().rfind(|span| span.2.is_none()) {
            Some((_, start, duration)) => {
                *duration = Some(now - *start);
                Ok(())
            }
            None => Err(Error::invalid("timer", "end was called with no open span")),
        }
    }

    fn take_spans(&mut self, _: &mut B::Context) -> Result<Vec<Span>> {
        let mut closed = Vec::new();
        self.spans.retain(|&(name, start_ns, duration)| {
            if let Some(duration_ns) = duration {
                closed.push(Span {
                    name,
                    start_ns,
                    duration_ns,
                });
            }
            duration.is_none()
        });
        Ok(closed)
    }
}

/// Spans as a Chrome trace (the JSON that `chrome://tracing` and Perfetto open).
pub fn chrome_trace(spans: &[Span]) -> String {
    let mut out = String::from("{\"traceEvents\":[");
    for (i, span) in spans.iter().enumerate() {
        let comma = if i == 0 { "" } else { "," };
        // Names are identifiers from the source, so they need no escaping. Times are microseconds.
        let _ = write!(
            out,
            "{comma}{{\"name\":\"{}\",\"ph\":\"X\",\"pid\":0,\"tid\":0,\"ts\":{:.3},\"dur\":{:.3}}}",
            span.name,
            span.start_ns as f64 / 1e3,
            span.duration_ns as f64 / 1e3
        );
    }
    out.push_str("]}");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_is_one_event_per_span() {
        let spans = [
            Span {
                name: "gemm",
                start_ns: 1500,
                duration_ns: 250,
            },
            Span {
                name: "norm",
                start_ns: 2000,
                duration_ns: 1,
            },
        ];
        let trace = chrome_trace(&spans);
        assert_eq!(trace.matches("\"ph\":\"X\"").count(), 2);
        assert!(trace.contains("\"ts\":1.500,\"dur\":0.250"), "{trace}");
    }
}
