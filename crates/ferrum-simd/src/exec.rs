//! How ops run: the device's threads and level, and the scratch memory of a context.

use super::attention::queries::Queries;
use super::isa::Level;
use super::memory::CpuBuffer;
use super::store::PackedStore;
use super::threads::Pool;
use ferrum_types::Result;
use std::ops::Range;
use std::sync::Arc;

/// Work, in element operations, below which waking another thread costs more than it brings.
const WORTH_A_THREAD: usize = 16 << 10;
/// Tasks per thread: enough that a late thread does not make the others wait for long.
const TASKS_PER_THREAD: usize = 4;
/// Tasks per thread where each is at least [`LARGE_TASK`].
const MAX_TASKS_PER_THREAD: usize = 16;
/// Element operations of a task that is worth being one of many: about ten microseconds.
const LARGE_TASK: usize = 1 << 19;

/// The threads and the level that ops run with.
pub struct Exec {
    /// The threads.
    pub pool: Arc<Pool>,
    /// The instruction-set level.
    pub level: Level,
    /// Where packed weights are kept, on a handle that loads with one.
    pub store: Option<Arc<dyn PackedStore>>,
}

impl Exec {
    /// Calls `f` with ranges that cover `0..units`, and the number of the calling thread. One unit
    /// costs about `cost` element operations; small work stays on this thread.
    pub fn parallel_for(&self, units: usize, cost: usize, f: impl Fn(Range<usize>, usize) + Sync) {
        let total = units.saturating_mul(cost.max(1));
        let threads = self.pool.threads();
        let large = (total / LARGE_TASK).min(threads * MAX_TASKS_PER_THREAD);
        let tasks = units
            .min(large.max(threads * TASKS_PER_THREAD))
            .min(total / WORTH_A_THREAD)
            .max(1);
        if tasks == 1 || threads == 1 {
            if units > 0 {
                f(0..units, 0);
            }
            return;
        }
        self.pool.run(tasks, &|task, thread| {
            f(units * task / tasks..units * (task + 1) / tasks, thread);
        });
    }

    /// Calls `f` with each unit, which threads take one by one: for units of different cost. All cost
    /// about `total` element operations; small work, and a single unit, stays on this thread.
    pub fn parallel_for_dynamic(
        &self,
        units: usize,
        total: usize,
        f: impl Fn(usize, usize) + Sync,
    ) {
        if total < WORTH_A_THREAD || units <= 1 {
            (0..units).for_each(|unit| f(unit, 0));
        } else {
            self.pool.run(units, &f);
        }
    }
}

/// Memory that ops of a context need for a moment. Grows to the largest need and stays, so that a
/// steady step allocates nothing.
pub struct Scratch {
    floats: CpuBuffer<f32>,
    /// Room for a list of work items.
    pub items: Vec<[usize; 3]>,
    /// Room for the sequences of a batch.
    pub(crate) queries: Vec<Queries>,
}

impl Scratch {
    /// No memory yet.
    ///
    /// # Errors
    /// [`OutOfMemory`](ferrum_types::Error::OutOfMemory).
    pub fn new() -> Result<Self> {
        Ok(Self {
            floats: CpuBuffer::zeroed(0)?,
            items: Vec::new(),
            queries: Vec::new(),
        })
    }

    /// `len` floats with any contents.
    ///
    /// # Errors
    /// [`OutOfMemory`](ferrum_types::Error::OutOfMemory).
    pub fn floats(&mut self, len: usize) -> Result<&mut [f32]> {
        if self.floats.as_slice().len() < len {
            self.floats = CpuBuffer::zeroed(0)?;
            self.floats = CpuBuffer::zeroed(len)?;
        }
        Ok(&mut self.floats.as_mut_slice()[..len])
    }

    /// `len` floats and the list of items.
    ///
    /// # Errors
    /// [`OutOfMemory`](ferrum_types::Error::OutOfMemory).
    pub fn floats_and_items(&mut self, len: usize) -> Result<(&mut [f32], &[[usize; 3]])> {
        self.floats(len)?;
        Ok((&mut self.floats.as_mut_slice()[..len], &self.items))
    }
}
