//! Spans of device time.
//!
//! Where the device can write timestamps between passes they are its own, recorded with the work.
//! Elsewhere ([`GpuTimer::on_device`] is false) the host's clock is read after waiting for the
//! device, which costs a submission at each end of a span.

use super::GpuBackend;
use super::buffer::RawBuffer;
use super::context::GpuContext;
use crate::backend::{BackendTimer, Span};
use ferrum_types::{Error, Result};
use std::time::Instant;

/// Timestamps in one query set.
const SET: u32 = 1024;

struct Open {
    name: &'static str,
    start: u64,
    end: Option<u64>,
}

/// Measures spans of a context.
pub struct GpuTimer {
    clock: Clock,
    /// In order of opening. Times are numbers of timestamps, or nanoseconds of the host's clock.
    spans: Vec<Open>,
}

enum Clock {
    Device(Queries),
    Host(Instant),
}

/// Timestamps written so far; number 0 is when the timer was made.
struct Queries {
    sets: Vec<wgpu::QuerySet>,
    used: u64,
    /// Nanoseconds of a tick.
    period: f64,
}

impl Queries {
    fn new(backend: &GpuBackend) -> Self {
        let mut queries = Queries {
            sets: Vec::new(),
            used: 0,
            period: f64::from(backend.shared.queue.get_timestamp_period()),
        };
        let device = &backend.shared.device;
        let mut encoder = device.create_command_encoder(&Default::default());
        queries.write(device, &mut encoder);
        backend.shared.queue.submit([encoder.finish()]);
        queries
    }

    /// Writes a timestamp and returns its number.
    fn write(&mut self, device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder) -> u64 {
        let number = self.used;
        let (set, index) = (number / u64::from(SET), (number % u64::from(SET)) as u32);
        if set as usize == self.sets.len() {
            self.sets
                .push(device.create_query_set(&wgpu::QuerySetDescriptor {
                    label: Some("timestamps"),
                    ty: wgpu::QueryType::Timestamp,
                    count: SET,
                }));
        }
        encoder.write_timestamp(&self.sets[set as usize], index);
        self.used += 1;
        number
    }

    /// Nanoseconds since number 0 of every timestamp.
    fn read(&self, ctx: &mut GpuContext) -> Result<Vec<u64>> {
        let shared = ctx.shared().clone();
        let bytes = self.used * 8;
        let resolved = shared.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("timestamps"),
            size: bytes.next_multiple_of(wgpu::QUERY_RESOLVE_BUFFER_ALIGNMENT),
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        let raw = RawBuffer::new(&shared, bytes)?;
        let encoder = ctx.outside_pass();
        let mut left = self.used;
        for (i, set) in (0..).zip(&self.sets) {
            let n = left.min(u64::from(SET));
            encoder.resolve_query_set(set, 0..n as u32, &resolved, i * u64::from(SET) * 8);
            left -= n;
        }
        encoder.copy_buffer_to_buffer(&resolved, 0, &raw.buffer, 0, bytes);
        let mut ticks = vec![0u64; self.used as usize];
        let host: &mut [u8] = bytemuck::cast_slice_mut(&mut ticks);
        ctx.download(&raw, 0, bytes, |at, piece| {
            host[at..at + piece.len()].copy_from_slice(piece);
        })?;
        let zero = ticks.first().copied().unwrap_or(0);
        let ns = |tick: &u64| (tick.saturating_sub(zero) as f64 * self.period) as u64;
        Ok(ticks.iter().map(ns).collect())
    }
}

impl GpuTimer {
    /// Whether times are the device's own.
    pub fn on_device(&self) -> bool {
        matches!(self.clock, Clock::Device(_))
    }

    fn now(&mut self, ctx: &mut GpuContext) -> Result<u64> {
        match &mut self.clock {
            Clock::Device(queries) => {
                let shared = ctx.shared().clone();
                Ok(queries.write(&shared.device, ctx.outside_pass()))
            }
            Clock::Host(origin) => {
                ctx.finish("timer")?;
                Ok(origin.elapsed().as_nanos() as u64)
            }
        }
    }
}

impl BackendTimer<GpuBackend> for GpuTimer {
    fn new(device: &GpuBackend) -> Result<Self> {
        let clock = match device.shared.timestamps {
            true => Clock::Device(Queries::new(device)),
            false => Clock::Host(Instant::now()),
        };
        Ok(Self {
            clock,
            spans: Vec::new(),
        })
    }

    fn begin(&mut self, ctx: &mut GpuContext, name: &'static str) -> Result<()> {
        let start = self.now(ctx)?;
        self.spans.push(Open {
            name,
            start,
            end: None,
        });
        Ok(())
    }

    fn end(&mut self, ctx: &mut GpuContext) -> Result<()> {
        let Some(last) = self.spans.iter().rposition(|s| s.end.is_none()) else {
            return Err(Error::invalid("timer", "end was called with no open span"));
        };
        self.spans[last].end = Some(self.now(ctx)?);
        Ok(())
    }

    fn take_spans(&mut self, ctx: &mut GpuContext) -> Result<Vec<Span>> {
        let times = match &self.clock {
            Clock::Device(queries) => Some(queries.read(ctx)?),
            Clock::Host(_) => {
                ctx.finish("timer")?;
                None
            }
        };
        let at = |time: u64| match &times {
            Some(times) => times.get(time as usize).copied().unwrap_or(0),
            None => time,
        };
        let mut closed = Vec::new();
        self.spans.retain(|span| {
            if let Some(end) = span.end {
                closed.push(Span {
                    name: span.name,
                    start_ns: at(span.start),
                    duration_ns: at(end).saturating_sub(at(span.start)),
                });
            }
            span.end.is_none()
        });
        if let (Clock::Device(queries), true) = (&mut self.clock, self.spans.is_empty()) {
            queries.used = 1;
        }
        Ok(closed)
    }
}
