//! Timing: an op has run when its call returns, so the host's clock measures the device.

use super::{CpuBackend, CpuContext};
use crate::backend::{BackendTimer, Span};
use ferrum_types::{Error, Result};
use std::time::Instant;

/// The host's clock.
#[derive(Debug)]
pub struct CpuTimer {
    origin: Instant,
    /// In order of opening; a span without duration is open.
    spans: Vec<(&'static str, u64, Option<u64>)>,
}

impl CpuTimer {
    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl BackendTimer<CpuBackend> for CpuTimer {
    fn new(_: &CpuBackend) -> Result<Self> {
        Ok(Self {
            origin: Instant::now(),
            spans: Vec::new(),
        })
    }

    fn begin(&mut self, _: &mut CpuContext, name: &'static str) -> Result<()> {
        self.spans.push((name, self.now(), None));
        Ok(())
    }

    fn end(&mut self, _: &mut CpuContext) -> Result<()> {
        let now = self.now();
        match self.spans.iter_mut().rfind(|span| span.2.is_none()) {
            Some((_, start, duration)) => {
                *duration = Some(now - *start);
                Ok(())
            }
            None => Err(Error::invalid("timer", "end was called with no open span")),
        }
    }

    fn take_spans(&mut self, _: &mut CpuContext) -> Result<Vec<Span>> {
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
