//! Uploads of host data to the device, in the order of the recorded work.
//!
//! `Queue::write_buffer` takes effect before the whole next submission, so work already recorded
//! would see new contents too early. Here the data is put into mapped memory and a copy is recorded
//! where the write stands. The memory comes back when the device is done with it: a steady state
//! allocates nothing.
//!
//! wgpu has such a belt, but it panics when the device is lost; this one returns an error.

use std::sync::mpsc::{Receiver, Sender, channel};

/// Bytes of a chunk, unless a single write is larger.
const CHUNK: u64 = 256 << 10;

struct Chunk {
    buffer: wgpu::Buffer,
    used: u64,
}

impl Chunk {
    fn fits(&self, bytes: u64) -> bool {
        self.buffer.size() - self.used >= bytes
    }
}

/// A pool of mapped chunks.
pub(super) struct Staging {
    /// Mapped, partly filled, its copies recorded.
    active: Vec<Chunk>,
    /// Unmapped, to be submitted.
    closed: Vec<Chunk>,
    /// Mapped and empty.
    free: Vec<Chunk>,
    sender: Sender<Chunk>,
    receiver: Receiver<Chunk>,
    allocated: u64,
}

impl Staging {
    pub(super) fn new() -> Self {
        let (sender, receiver) = channel();
        Self {
            active: Vec::new(),
            closed: Vec::new(),
            free: Vec::new(),
            sender,
            receiver,
            allocated: 0,
        }
    }

    /// Chunks made so far.
    pub(super) fn allocated(&self) -> u64 {
        self.allocated
    }

    /// Records `to[offset..] = bytes`, filled up with zeros to a whole number of words.
    ///
    /// # Errors
    /// wgpu's words when the memory cannot be mapped (a lost device).
    pub(super) fn copy(
        &mut self,
        device: &wgpu::Device,
        encoder: &mut wgpu::CommandEncoder,
        bytes: &[u8],
        to: (&wgpu::Buffer, u64),
    ) -> Result<(), String> {
        let (buffer, from) = self.put(device, bytes)?;
        let words = (bytes.len() as u64).next_multiple_of(wgpu::COPY_BUFFER_ALIGNMENT);
        encoder.copy_buffer_to_buffer(&buffer, from, to.0, to.1, words);
        Ok(())
    }

    /// Puts `bytes`, filled up with zeros to a whole number of words, where copies of the next submission find them:
    /// a buffer, and the first byte in it.
    ///
    /// # Errors
    /// wgpu's words when the memory cannot be mapped (a lost device).
    pub(super) fn put(
        &mut self,
        device: &wgpu::Device,
        bytes: &[u8],
    ) -> Result<(wgpu::Buffer, u64), String> {
        let size = (bytes.len() as u64).next_multiple_of(wgpu::MAP_ALIGNMENT);
        let mut chunk = self.take(device, size);
        let from = chunk.used;
        {
            let view = chunk.buffer.get_mapped_range_mut(from..from + size);
            let mut view = view.map_err(|e| e.to_string())?;
            view.slice(..bytes.len()).copy_from_slice(bytes);
            view.slice(bytes.len()..).fill(0);
        }
        chunk.used += size;
        let buffer = chunk.buffer.clone();
        self.active.push(chunk);
        Ok((buffer, from))
    }

    fn take(&mut self, device: &wgpu::Device, size: u64) -> Chunk {
        if let Some(i) = self.active.iter().position(|c| c.fits(size)) {
            return self.active.swap_remove(i);
        }
        self.free.extend(self.receiver.try_iter());
        if let Some(i) = self.free.iter().position(|c| c.fits(size)) {
            return self.free.swap_remove(i);
        }
        self.allocated += 1;
        Chunk {
            buffer: device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("staging"),
                size: CHUNK.max(size),
                usage: wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: true,
            }),
            used: 0,
        }
    }

    /// Unmaps what was filled; to be called before the copies are submitted.
    pub(super) fn close(&mut self) {
        for chunk in self.active.drain(..) {
            chunk.buffer.unmap();
            self.closed.push(chunk);
        }
    }

    /// Asks for the chunks back; to be called after the copies were submitted.
    pub(super) fn recall(&mut self) {
        for chunk in self.closed.drain(..) {
            let sender = self.sender.clone();
            let buffer = chunk.buffer.clone();
            buffer.map_async(wgpu::MapMode::Write, .., move |mapped| {
                // An error means that the device is gone, and a closed channel that the context is.
                if mapped.is_ok() {
                    let _ = sender.send(Chunk { used: 0, ..chunk });
                }
            });
        }
    }
}
