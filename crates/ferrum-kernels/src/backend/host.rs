//! [`HostBuffer`]: memory of the host that a device copies to and from.

use ferrum_types::Element;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// Bytes of the host, wherever they are.
pub trait HostMemory: Send {
    /// The bytes, at an address that is a multiple of 16 and stays.
    fn bytes(&self) -> &[u8];

    /// The same, to be written.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Memory of the host that a device may have made so that it reaches it by itself, at full speed and while the host
/// goes on ([`Backend::host_buffer`](super::Backend::host_buffer)). It derefs to a slice.
pub struct HostBuffer<T> {
    memory: Memory<T>,
    len: usize,
}

enum Memory<T> {
    Plain(Vec<T>),
    OfDevice(Box<dyn HostMemory>, PhantomData<T>),
}

impl<T: Element> HostBuffer<T> {
    /// `len` zeros in ordinary memory.
    pub fn plain(len: usize) -> Self {
        let memory = Memory::Plain(vec![T::zeroed(); len]);
        Self { memory, len }
    }

    /// The first `len` elements of a device's memory, or as many as there are.
    pub fn of_device(memory: Box<dyn HostMemory>, len: usize) -> Self {
        let len = len.min(memory.bytes().len() / size_of::<T>());
        let memory = Memory::OfDevice(memory, PhantomData);
        Self { memory, len }
    }
}

impl<T: Element> Deref for HostBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.memory {
            Memory::Plain(elements) => elements,
            Memory::OfDevice(memory, _) => {
                bytemuck::cast_slice(&memory.bytes()[..self.len * size_of::<T>()])
            }
        }
    }
}

impl<T: Element> DerefMut for HostBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.memory {
            Memory::Plain(elements) => elements,
            Memory::OfDevice(memory, _) => {
                bytemuck::cast_slice_mut(&mut memory.bytes_mut()[..self.len * size_of::<T>()])
            }
        }
    }
}

impl<T> fmt::Debug for HostBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer")
            .field("len", &self.len)
            .field("of_device", &matches!(self.memory, Memory::OfDevice(..)))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::reference::ReferenceBackend;

    /// Memory that somebody else made.
    struct Pinned(Vec<u128>);

    impl HostMemory for Pinned {
        fn bytes(&self) -> &[u8] {
            bytemuck::cast_slice(&self.0)
        }

        fn bytes_mut(&mut self) -> &mut [u8] {
            bytemuck::cast_slice_mut(&mut self.0)
        }
    }

    #[test]
    fn a_buffer_is_a_slice_wherever_it_is() {
        let device = ReferenceBackend::new();
        let pinned = |len| HostBuffer::of_device(Box::new(Pinned(vec![0; 2])), len);
        let buffers: [HostBuffer<f32>; 3] = [device.host_buffer(5).unwrap(), pinned(5), pinned(99)];
        for (mut buffer, len) in buffers.into_iter().zip([5, 5, 8]) {
            assert_eq!(*buffer, vec![0.0; len], "{buffer:?}");
            buffer[4] = 1.5;
            buffer[..2].copy_from_slice(&[2.0, 3.0]);
            assert_eq!(buffer[..5], [2.0, 3.0, 0.0, 0.0, 1.5], "{buffer:?}");
        }
    }
}
