//! Where the time of a step goes: a span for each op of the forward path, if someone asked.

use ferrum_kernels::{Backend, BackendTimer, Span};
use ferrum_types::Result;

/// Measures the ops of a step where they run, or nothing.
pub(crate) struct Profiler<B: Backend>(Option<B::Timer>);

impl<B: Backend> Profiler<B> {
    pub(crate) fn new(device: &B, on: bool) -> Result<Self> {
        on.then(|| B::Timer::new(device)).transpose().map(Self)
    }

    /// Runs `op` in a span.
    #[inline]
    pub(crate) fn measure(
        &mut self,
        ctx: &mut B::Context,
        name: &'static str,
        op: impl FnOnce(&mut B::Context) -> Result<()>,
    ) -> Result<()> {
        let Some(timer) = &mut self.0 else {
            return op(ctx);
        };
        timer.begin(ctx, name)?;
        let done = op(ctx);
        timer.end(ctx)?;
        done
    }

    pub(crate) fn take_spans(&mut self, ctx: &mut B::Context) -> Result<Vec<Span>> {
        match &mut self.0 {
            Some(timer) => timer.take_spans(ctx),
            None => Ok(Vec::new()),
        }
    }
}
