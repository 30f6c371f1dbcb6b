//! Work that is recorded, and run when somebody waits for it: as late as a device may be.

use super::{P, R};
use ferrum_kernels::reference::{RefBuffer, RefContext};
use ferrum_kernels::{
    Backend, DeviceBuffer, FinishRead, GraphKey, GraphRun, HostMemory, PendingRead,
};
use ferrum_types::{Element, Error, Result};
use std::collections::HashMap;
use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Memory that recorded work shares with the handles to it.
#[derive(Debug)]
pub struct Memory<T> {
    data: Arc<RwLock<T>>,
    len: usize,
}

impl<T> Clone for Memory<T> {
    fn clone(&self) -> Self {
        Self {
            data: Arc::clone(&self.data),
            len: self.len,
        }
    }
}

impl<T: Default> Default for Memory<T> {
    fn default() -> Self {
        Self::new(T::default(), 0)
    }
}

impl<T> Memory<T> {
    pub(super) fn new(data: T, len: usize) -> Self {
        Self {
            data: Arc::new(RwLock::new(data)),
            len,
        }
    }

    pub(super) fn get(&self) -> RwLockReadGuard<'_, T> {
        self.data.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get_mut(&self) -> RwLockWriteGuard<'_, T> {
        self.data.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send + Sync + 'static> DeviceBuffer for Memory<T> {
    fn len(&self) -> usize {
        self.len
    }
}

/// Something to do, as often as it is replayed.
type Work = Arc<dyn Fn(&mut RefContext<P>) -> Result<()> + Send + Sync>;

/// What was recorded on a context, oldest first.
pub(super) struct Queue {
    reference: RefContext<P>,
    work: Vec<Work>,
    /// Where work goes while a graph is captured.
    capture: Option<Vec<Work>>,
    graphs: HashMap<GraphKey, Vec<Work>>,
}

/// A queue that reads which were begun share with the context.
#[derive(Clone)]
pub(super) struct SharedQueue(Arc<Mutex<Queue>>);

impl SharedQueue {
    pub(super) fn new() -> Result<Self> {
        Ok(Self(Arc::new(Mutex::new(Queue {
            reference: R::new().new_context()?,
            work: Vec::new(),
            capture: None,
            graphs: HashMap::new(),
        }))))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an op at the end.
    pub(super) fn record(
        &self,
        work: impl Fn(&mut RefContext<P>) -> Result<()> + Send + Sync + 'static,
    ) {
        let mut queue = self.lock();
        let Queue {
            work: all, capture, ..
        } = &mut *queue;
        capture.as_mut().unwrap_or(all).push(Arc::new(work));
    }

    /// Runs all that was recorded, up to the first that fails.
    pub(super) fn run(&self) -> Result<()> {
        let mut queue = self.lock();
        if queue.capture.is_some() {
            return Err(Error::invalid("read", "a graph is being captured"));
        }
        let work = take(&mut queue.work);
        work.iter().try_for_each(|work| work(&mut queue.reference))
    }

    /// Records that bytes are copied to the host when the work before has run.
    pub(super) fn begin_read<T: Element>(
        &self,
        src: Memory<RefBuffer<T>>,
        offset: usize,
        len: usize,
    ) -> PendingRead<T> {
        let elements = Arc::new(Mutex::new(vec![T::zeroed(); len]));
        let to = Arc::clone(&elements);
        self.record(move |ctx| {
            let mut to = to.lock().unwrap_or_else(PoisonError::into_inner);
            R::read(ctx, &src.get(), offset, &mut to)
        });
        PendingRead::Later(Box::new(Copied {
            queue: self.clone(),
            elements,
        }))
    }

    pub(super) fn run_graph(
        &self,
        key: GraphKey,
        body: &mut dyn FnMut() -> Result<()>,
    ) -> Result<GraphRun> {
        let graph = self.lock().graphs.get(&key).cloned();
        if let Some(graph) = graph {
            self.lock().work.extend(graph);
            return Ok(GraphRun::Replayed);
        }
        self.lock().capture = Some(Vec::new());
        let done = body();
        let captured = self.lock().capture.take().unwrap_or_default();
        done?;
        let mut queue = self.lock();
        queue.work.extend(captured.iter().cloned());
        queue.graphs.insert(key, captured);
        Ok(GraphRun::Captured)
    }

    pub(super) fn forget(&self, key: Option<GraphKey>) {
        let graphs = &mut self.lock().graphs;
        match key {
            Some(key) => drop(graphs.remove(&key)),
            None => graphs.clear(),
        }
    }
}

/// Memory of the host as a device makes it.
pub(super) struct Pinned(Vec<u128>);

impl Pinned {
    pub(super) fn boxed(bytes: usize) -> Box<dyn HostMemory> {
        Box::new(Self(vec![0; bytes.div_ceil(size_of::<u128>())]))
    }
}

impl HostMemory for Pinned {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// Elements that are there once the queue has run.
struct Copied<T> {
    queue: SharedQueue,
    elements: Arc<Mutex<Vec<T>>>,
}

impl<T: Element> FinishRead for Copied<T> {
    fn finish(self: Box<Self>, out: &mut [u8]) -> Result<()> {
        self.queue.run()?;
        let elements = self.elements.lock().unwrap_or_else(PoisonError::into_inner);
        out.copy_from_slice(bytemuck::cast_slice(&elements));
        Ok(())
    }

    fn bytes(&self) -> usize {
        let elements = self.elements.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::size_of_val(elements.as_slice())
    }
}
