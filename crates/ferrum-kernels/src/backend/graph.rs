//! Capture and replay of steps as device graphs.

use super::Backend;
use ferrum_types::Result;

/// What distinguishes one captured step from another (shape bucket, logit rows, …).
pub type GraphKey = u64;

/// How a step was run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphRun {
    /// The body ran and its work was captured under the key.
    Captured,
    /// The captured work ran; the body did not.
    Replayed,
    /// The body ran as always: this device has nothing to capture.
    Immediate,
}

/// Capture, replay by key, reset. The provided methods are those of a device that has nothing to
/// capture: a body simply runs.
///
/// A body reads its step state from device buffers ([`super::DeviceBatch`]), which the caller fills
/// before each call; it must record the same ops over the same buffers for the same key. There is no
/// limit on the number of ops or layers.
pub trait BackendGraph: Backend {
    /// Whether steps are captured. Captured steps are padded to few sizes, with rows that are not read; where nothing is
    /// captured they have the rows that they have.
    fn captures(&self) -> bool {
        false
    }

    /// Runs `body`, or what was captured for `key` from an earlier run of it.
    ///
    /// # Errors
    /// Those of `body`; a failed capture leaves nothing under the key.
    fn run_graph(
        ctx: &mut Self::Context,
        key: GraphKey,
        body: &mut dyn FnMut(&mut Self::Context) -> Result<()>,
    ) -> Result<GraphRun> {
        let _ = key;
        body(ctx)?;
        Ok(GraphRun::Immediate)
    }

    /// Forgets what was captured for `key`.
    fn reset_graph(_ctx: &mut Self::Context, _key: GraphKey) -> Result<()> {
        Ok(())
    }

    /// Forgets everything captured on this context.
    fn reset_all_graphs(_ctx: &mut Self::Context) -> Result<()> {
        Ok(())
    }
}
