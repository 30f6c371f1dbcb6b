//! Typed device memory.

use super::BACKEND;
use super::core::Shared;
use super::memory::Memory;
use crate::backend::DeviceBuffer;
use ferrum_types::{Element, Error, Result};
use std::marker::PhantomData;

/// Memory of one device for elements of type `T`.
pub struct CudaBuffer<T> {
    pub(super) memory: Memory,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: Element> DeviceBuffer for CudaBuffer<T> {
    fn len(&self) -> usize {
        self.len
    }
}

impl<T: Element> CudaBuffer<T> {
    /// Memory with anything in it.
    pub(super) fn unwritten(shared: &Shared, len: usize) -> Result<Self> {
        Ok(Self {
            memory: Memory::new(&shared.driver, bytes_of::<T>(len)?)?,
            len,
            element: PhantomData,
        })
    }

    /// Zeros.
    pub(super) fn zeros(shared: &Shared, len: usize) -> Result<Self> {
        let buffer = Self::unwritten(shared, len)?;
        shared.zero(buffer.memory.at, buffer.memory.bytes)?;
        Ok(buffer)
    }

    /// The address of an element.
    pub(super) fn at(&self, index: usize) -> u64 {
        self.memory.at + (index * size_of::<T>()) as u64
    }
}

/// Bytes of `len` elements.
fn bytes_of<T: Element>(len: usize) -> Result<usize> {
    let bytes = len.checked_mul(size_of::<T>());
    bytes.ok_or_else(|| Error::OutOfMemory {
        backend: BACKEND,
        requested: u64::MAX,
        reason: format!("{len} elements are more than the address space holds"),
    })
}
