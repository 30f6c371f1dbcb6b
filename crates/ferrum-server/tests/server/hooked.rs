//! A runner around another one, for tests that look at its steps or spoil them.

use ferrum_engine::{AdapterLoader, LoadedAdapter, StepRunner};
use ferrum_kernels::Span;
use ferrum_models::{DecoderSpec, Readback, RunnerConfig, StepBatch, StepOutput, Ticket};
use ferrum_types::{AdapterId, Result};

/// What happens at each step beside the step.
pub(super) trait Hooks: Send {
    /// Before a step, which does not come if this fails.
    fn before(&mut self, batch: &StepBatch) -> Result<()>;

    /// With what was read of it. `wanted` is what was wanted of its rows.
    fn after(&mut self, _wanted: &[Readback], _output: &mut StepOutput) {}
}

struct Hooked<H> {
    inner: Box<dyn StepRunner>,
    hooks: H,
    wanted: Vec<Readback>,
}

/// `inner` with these hooks.
pub(super) fn hooked(
    inner: Box<dyn StepRunner>,
    hooks: impl Hooks + 'static,
) -> Box<dyn StepRunner> {
    let wanted = Vec::new();
    Box::new(Hooked {
        inner,
        hooks,
        wanted,
    })
}

impl<H: Hooks> StepRunner for Hooked<H> {
    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn samples(&self) -> bool {
        self.inner.samples()
    }

    fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        self.hooks.before(batch)?;
        self.wanted = wanted.to_vec();
        self.inner.submit(batch, wanted)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        self.inner.collect(ticket, out)?;
        self.hooks.after(&self.wanted, out);
        Ok(())
    }

    fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    fn spec(&self) -> &DecoderSpec {
        self.inner.spec()
    }

    fn config(&self) -> &RunnerConfig {
        self.inner.config()
    }

    fn take_spans(&mut self) -> Result<Vec<Span>> {
        self.inner.take_spans()
    }

    fn adapter_loader(&self) -> AdapterLoader {
        self.inner.adapter_loader()
    }

    fn add_adapter(&mut self, id: AdapterId, adapter: LoadedAdapter) -> Result<()> {
        self.inner.add_adapter(id, adapter)
    }

    fn unload_adapter(&mut self, id: AdapterId) -> bool {
        self.inner.unload_adapter(id)
    }
}
