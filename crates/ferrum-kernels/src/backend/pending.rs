//! [`PendingRead`]: a read that was begun, and that the host will wait for later.

use ferrum_types::{Element, Error, Result};

/// What [`begin_read`](super::Backend::begin_read) began. Dropped, it is not waited for.
#[must_use = "a read is to be finished"]
pub enum PendingRead<T> {
    /// The elements, which were there at once.
    Ready(Vec<T>),
    /// They are being copied.
    Later(Box<dyn FinishRead>),
}

/// The end of a read on a device.
pub trait FinishRead: Send {
    /// Waits for the bytes, as many as were asked for, and writes them to `out`.
    ///
    /// # Errors
    /// What the device says.
    fn finish(self: Box<Self>, out: &mut [u8]) -> Result<()>;

    /// How many bytes there are.
    fn bytes(&self) -> usize;
}

impl<T: Element> PendingRead<T> {
    /// Waits, and writes the elements to `out`.
    ///
    /// # Errors
    /// `Shape` when `out` has another length than was asked for; what the device says.
    pub fn finish(self, out: &mut [T]) -> Result<()> {
        let expected = match &self {
            Self::Ready(elements) => elements.len(),
            Self::Later(read) => read.bytes() / size_of::<T>(),
        };
        if out.len() != expected {
            return Err(Error::Shape {
                op: "finish_read",
                what: "out",
                found: out.len(),
                expected,
            });
        }
        match self {
            Self::Ready(elements) => {
                out.copy_from_slice(&elements);
                Ok(())
            }
            Self::Later(read) => read.finish(bytemuck::cast_slice_mut(out)),
        }
    }
}
