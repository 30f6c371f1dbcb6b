//! Typed device memory.
//!
//! Shaders see memory as 32-bit words, so a buffer's size is rounded up to whole words (and to 16
//! bytes, the largest element that a shader loads at once). Elements of fewer bytes lie packed.

use super::GpuBackend;
use super::core::{Shared, lock};
use crate::backend::{Backend, DeviceBuffer};
use ferrum_types::{Element, Error, Result};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of an upload that wgpu may hold in staging memory at once.
const UPLOAD_STEP: usize = 32 << 20;

/// Untyped device memory that shaders can bind.
pub(super) struct RawBuffer {
    pub(super) buffer: wgpu::Buffer,
    /// Names the buffer in the cache of bind groups; never reused.
    pub(super) id: u64,
    shared: Arc<Shared>,
}

impl Drop for RawBuffer {
    fn drop(&mut self) {
        // A cached bind group would keep the memory alive for as long as the device.
        lock(&self.shared.pipelines).forget_buffer(self.id);
    }
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl RawBuffer {
    /// Zeros.
    ///
    /// # Errors
    /// `OutOfMemory` for more bytes than a buffer or a binding may have on this device.
    pub(super) fn new(shared: &Arc<Shared>, bytes: u64) -> Result<Self> {
        let out_of_memory = |reason: String| Error::OutOfMemory {
            backend: shared.info.backend,
            requested: bytes,
            reason,
        };
        let size = bytes.max(16).next_multiple_of(16);
        let limit = shared.max_binding.min(shared.max_buffer);
        if size > limit {
            let reason = format!("the device's limit for one buffer is {limit} bytes");
            return Err(out_of_memory(reason));
        }
        let scope = shared
            .device
            .push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let buffer = shared.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size,
            usage: wgpu::BufferUsages::STORAGE
                | wgpu::BufferUsages::COPY_SRC
                | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        if let Some(e) = pollster::block_on(scope.pop()) {
            return Err(out_of_memory(e.to_string()));
        }
        Ok(Self {
            buffer,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            shared: Arc::clone(shared),
        })
    }

    /// A buffer of `bytes`, filled by `fill(offset, destination)` in steps whose offsets and sizes
    /// are multiples of `unit` (the last may be shorter).
    ///
    /// The steps go straight into staging memory, one at a time, so that loading needs little more
    /// memory than the weights themselves.
    pub(super) fn upload(
        shared: &Arc<Shared>,
        bytes: usize,
        unit: usize,
        mut fill: impl FnMut(usize, wgpu::WriteOnly<'_, [u8]>),
    ) -> Result<Self> {
        let raw = Self::new(shared, bytes as u64)?;
        let step = (UPLOAD_STEP / unit).max(1) * unit;
        let mut at = 0;
        while at < bytes {
            let size = step.min(bytes - at);
            let padded = (size as u64).next_multiple_of(wgpu::COPY_BUFFER_ALIGNMENT);
            if let Some(size_padded) = wgpu::BufferSize::new(padded) {
                let view = shared
                    .queue
                    .write_buffer_with(&raw.buffer, at as u64, size_padded);
                let mut view = view.ok_or_else(|| {
                    let fault = shared.check("upload").err();
                    fault.unwrap_or_else(|| shared.failure("upload", "no staging memory"))
                })?;
                // The padding of the last step must not carry what the staging memory held before.
                if padded > size as u64 {
                    view.slice(size..).fill(0);
                }
                fill(at, view.slice(..size));
            }
            at += size;
            if at < bytes {
                let submitted = shared.queue.submit([]);
                shared.wait("upload", submitted)?;
            }
        }
        // Starts the copy, so that staging memory is freed at the next wait and not at the next step.
        shared.queue.submit([]);
        Ok(raw)
    }
}

/// Memory of one device for elements of type `T`.
pub struct GpuBuffer<T> {
    pub(super) raw: RawBuffer,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: Element> DeviceBuffer for GpuBuffer<T> {
    fn len(&self) -> usize {
        self.len
    }
}

/// Bytes of `len` elements.
fn bytes_of<T: Element>(len: usize) -> Result<u64> {
    let bytes = len.checked_mul(size_of::<T>());
    bytes.map(|b| b as u64).ok_or_else(|| Error::OutOfMemory {
        backend: GpuBackend::NAME,
        requested: u64::MAX,
        reason: format!("{len} elements are more than the address space holds"),
    })
}

pub(super) fn alloc<T: Element>(shared: &Arc<Shared>, len: usize) -> Result<GpuBuffer<T>> {
    Ok(GpuBuffer {
        raw: RawBuffer::new(shared, bytes_of::<T>(len)?)?,
        len,
        element: PhantomData,
    })
}

pub(super) fn from_slice<T: Element>(shared: &Arc<Shared>, data: &[T]) -> Result<GpuBuffer<T>> {
    let bytes: &[u8] = bytemuck::cast_slice(data);
    let raw = RawBuffer::upload(shared, bytes.len(), 4, |at, mut to| {
        to.copy_from_slice(&bytes[at..at + to.len()]);
    })?;
    Ok(GpuBuffer {
        raw,
        len: data.len(),
        element: PhantomData,
    })
}
