//! The buffers of one run of a case.
//!
//! Everything that a case hands to an op comes from here, so that every case gets the same rough
//! treatment: buffers are longer than the shape asks for, inputs end in NaN, outputs are filled with
//! NaN before the op runs and end in a guard that must survive it. The same run can be repeated with
//! one buffer an element too short, and (to prove that the suite is able to fail) with a result
//! that was tampered with.

use ferrum_kernels::{Act, Backend, DeviceBuffer};
use ferrum_types::{Dtype, Element, Error, FloatElement};

/// Elements past the end of the shape.
const GUARD: usize = 5;
/// What a guard holds: exact in every float type.
const GUARD_VALUE: f32 = 12288.0;
/// Value of integers that no op should read, or that should be written over.
const NO_INDEX: i32 = i32::MIN + 7;

/// Why a case did not pass.
#[derive(Debug)]
pub(crate) enum CaseError {
    /// The backend returned an error.
    Error(Error),
    /// The backend did something that it must not do.
    Wrong(String),
}

impl From<Error> for CaseError {
    fn from(error: Error) -> Self {
        CaseError::Error(error)
    }
}

/// `CaseError::Wrong` with a formatted sentence.
pub(crate) fn wrong<T>(sentence: impl Into<String>) -> Check<T> {
    Err(CaseError::Wrong(sentence.into()))
}

/// What a backend refused in a case, and how.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Vec<(String, Error)>);

impl Refusals {
    /// Fails unless `result` says that a shape or an argument is wrong, or out of the backend's reach.
    pub(crate) fn expect<T>(&mut self, what: &str, result: ferrum_types::Result<T>) -> Check {
        match result {
            Err(
                error @ (Error::Shape { .. }
                | Error::InvalidArgument { .. }
                | Error::Unsupported { .. }),
            ) => {
                self.0.push((what.to_owned(), error));
                Ok(())
            }
            Err(error) => wrong(format!(
                "{what} gave the error \"{error}\", expected a refusal"
            )),
            Ok(_) => wrong(format!("{what} gave no error, expected a refusal")),
        }
    }

    /// Fails where an error is another than the reference's and not a limit of this backend alone.
    pub(crate) fn compare(&self, reference: &Self) -> Check {
        if self.0.len() != reference.0.len() {
            let (found, expected) = (self.0.len(), reference.0.len());
            return wrong(format!("{found} refusals, the reference has {expected}"));
        }
        for ((what, found), (_, expected)) in self.0.iter().zip(&reference.0) {
            let own_limit = matches!(found, Error::Unsupported { .. });
            if !own_limit && found != expected {
                return wrong(format!(
                    "{what} gave \"{found}\", the reference says \"{expected}\""
                ));
            }
        }
        Ok(())
    }
}

/// What a step of a case returns.
pub(crate) type Check<T = ()> = Result<T, CaseError>;

/// Tampering with the first result of a run, as a wrong kernel would.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// None: the run as it is.
    None,
    /// One element has another value.
    Perturbed,
    /// The last element was never written.
    Unwritten,
    /// The element after the last one was written.
    Overrun,
}

impl Fault {
    /// What can go wrong.
    pub(crate) const ALL: [Fault; 3] = [Fault::Perturbed, Fault::Unwritten, Fault::Overrun];
}

/// A result on the host.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    pub(crate) name: &'static str,
    pub(crate) values: Vec<f64>,
    /// Its element.
    pub(crate) dtype: Dtype,
    /// An expectation as the element holds it.
    pub(crate) round: fn(f64) -> f64,
}

/// A context on a device, with the buffers made for one run.
pub(crate) struct Io<'d, B: Backend> {
    pub(crate) device: &'d B,
    pub(crate) ctx: B::Context,
    pub(crate) outputs: Vec<Output>,
    fault: Fault,
    /// Buffers whose length an op has to check, in order of creation.
    checked: Vec<&'static str>,
    short: Option<usize>,
}

impl<'d, B: Backend> Io<'d, B> {
    pub(crate) fn new(device: &'d B, fault: Fault) -> Check<Self> {
        Ok(Io {
            device,
            ctx: device.new_context()?,
            outputs: Vec::new(),
            fault,
            checked: Vec::new(),
            short: None,
        })
    }

    /// A run whose checked buffer number `short` lacks one element.
    pub(crate) fn shortened(device: &'d B, short: usize) -> Check<Self> {
        let mut io = Io::new(device, Fault::None)?;
        io.short = Some(short);
        Ok(io)
    }

    /// Names of the buffers that this run has made.
    pub(crate) fn checked(&self) -> &[&'static str] {
        &self.checked
    }

    /// Whether the next buffer is the one to be too short.
    fn is_short(&mut self, name: &'static str, len: usize) -> bool {
        if len == 0 {
            return false;
        }
        self.checked.push(name);
        self.short == Some(self.checked.len() - 1)
    }

    /// A buffer that holds `data` and ends in copies of `tail`.
    fn buffer<T: Element>(
        &mut self,
        name: &'static str,
        mut data: Vec<T>,
        tail: T,
    ) -> Check<B::Buffer<T>> {
        if self.is_short(name, data.len()) {
            data.pop();
        } else {
            data.extend([tail; GUARD]);
        }
        Ok(self.device.from_slice(&data)?)
    }

    /// A buffer of `len` times `poison` that ends in a guard.
    fn poisoned<T: Element>(
        &mut self,
        name: &'static str,
        len: usize,
        poison: T,
        guard: T,
    ) -> Check<B::Buffer<T>> {
        let len = if self.is_short(name, len) {
            len - 1
        } else {
            len + GUARD
        };
        let mut data = vec![poison; len];
        let end = len.saturating_sub(GUARD);
        data[end..].fill(guard);
        let mut buffer = self.device.alloc(len)?;
        B::write(&mut self.ctx, &mut buffer, 0, &data)?;
        Ok(buffer)
    }

    /// Activations to read.
    pub(crate) fn input(&mut self, name: &'static str, values: &[f32]) -> Check<Act<B>> {
        self.input_of(name, values)
    }

    /// Numbers of any role to read.
    pub(crate) fn input_of<T: FloatElement>(
        &mut self,
        name: &'static str,
        values: &[f32],
    ) -> Check<B::Buffer<T>> {
        let data = values.iter().map(|&x| T::from_f32(x)).collect();
        self.buffer(name, data, T::from_f32(f32::NAN))
    }

    /// Activations to read and write.
    pub(crate) fn inout(&mut self, name: &'static str, values: &[f32]) -> Check<Act<B>> {
        self.inout_of(name, values)
    }

    /// Numbers of any role to read and write.
    pub(crate) fn inout_of<T: FloatElement>(
        &mut self,
        name: &'static str,
        values: &[f32],
    ) -> Check<B::Buffer<T>> {
        let data = values.iter().map(|&x| T::from_f32(x)).collect();
        self.buffer(name, data, T::from_f32(GUARD_VALUE))
    }

    /// Activations to write.
    pub(crate) fn output(&mut self, name: &'static str, len: usize) -> Check<Act<B>> {
        self.output_of(name, len)
    }

    /// Numbers of any role to write.
    pub(crate) fn output_of<T: FloatElement>(
        &mut self,
        name: &'static str,
        len: usize,
    ) -> Check<B::Buffer<T>> {
        let (poison, guard) = (T::from_f32(f32::NAN), T::from_f32(GUARD_VALUE));
        self.poisoned(name, len, poison, guard)
    }

    /// Parameters in f32 to read.
    pub(crate) fn floats(&mut self, name: &'static str, values: &[f32]) -> Check<B::Buffer<f32>> {
        self.buffer(name, values.to_vec(), f32::NAN)
    }

    /// Parameters in f32 that are there, or not.
    pub(crate) fn optional_floats(
        &mut self,
        name: &'static str,
        values: Option<&[f32]>,
    ) -> Check<Option<B::Buffer<f32>>> {
        values.map(|values| self.floats(name, values)).transpose()
    }

    /// Integers to read.
    pub(crate) fn indices(&mut self, name: &'static str, values: &[i32]) -> Check<B::Buffer<i32>> {
        self.buffer(name, values.to_vec(), NO_INDEX)
    }

    /// Integers to write.
    pub(crate) fn index_output(&mut self, name: &'static str, len: usize) -> Check<B::Buffer<i32>> {
        self.poisoned(name, len, NO_INDEX, GUARD_VALUE as i32)
    }

    /// f32 to write, whatever activations are.
    pub(crate) fn float_output(&mut self, name: &'static str, len: usize) -> Check<B::Buffer<f32>> {
        self.poisoned(name, len, f32::NAN, GUARD_VALUE)
    }

    /// A buffer of exactly these elements, whose length no op has to check.
    pub(crate) fn exact<T: Element>(&self, values: &[T]) -> Check<B::Buffer<T>> {
        Ok(self.device.from_slice(values)?)
    }

    /// Reads the numbers that an op was to write.
    pub(crate) fn take<T: FloatElement>(
        &mut self,
        name: &'static str,
        buffer: &B::Buffer<T>,
        len: usize,
    ) -> Check {
        let round = |x| f64::from(T::from_f32(x as f32).to_f32());
        self.take_as(name, buffer, len, T::to_f32, round)
    }

    /// Reads the f32 that an op was to write.
    pub(crate) fn take_floats(
        &mut self,
        name: &'static str,
        buffer: &B::Buffer<f32>,
        len: usize,
    ) -> Check {
        self.take_as(name, buffer, len, |x| x, |x| x)
    }

    /// Reads the integers that an op was to write.
    pub(crate) fn take_indices(
        &mut self,
        name: &'static str,
        buffer: &B::Buffer<i32>,
        len: usize,
    ) -> Check {
        self.take_as(name, buffer, len, |x| x, |x| x)
    }

    fn take_as<T: Element, F: Into<f64>>(
        &mut self,
        name: &'static str,
        buffer: &B::Buffer<T>,
        len: usize,
        value: impl Fn(T) -> F,
        round: fn(f64) -> f64,
    ) -> Check {
        let data = B::to_vec(&mut self.ctx, buffer)?;
        if data.len() != buffer.len() || data.len() < len {
            let (found, expected) = (data.len(), buffer.len().max(len));
            return wrong(format!(
                "reading {name} gave {found} elements, expected {expected}"
            ));
        }
        let mut values: Vec<f64> = data.into_iter().map(|x| value(x).into()).collect();
        if self.outputs.is_empty() {
            tamper(
                &mut values,
                len,
                std::mem::replace(&mut self.fault, Fault::None),
            );
        }
        let guard = values.split_off(len);
        if let Some(i) = guard.iter().position(|&x| x != f64::from(GUARD_VALUE)) {
            let (at, found) = (len + i, guard[i]);
            return wrong(format!(
                "{name}[{at}] is {found:e}: it lies past the {len} elements of the shape and must stay as it was"
            ));
        }
        self.outputs.push(Output {
            name,
            values,
            dtype: T::DTYPE,
            round,
        });
        Ok(())
    }
}

fn tamper(values: &mut [f64], len: usize, fault: Fault) {
    let (body, guard) = values.split_at_mut(len);
    let largest = |a: &&mut f64, b: &&mut f64| a.abs().total_cmp(&b.abs());
    let target = match fault {
        Fault::None => return,
        Fault::Overrun => None,
        Fault::Unwritten => body.last_mut(),
        Fault::Perturbed => body.iter_mut().filter(|x| x.is_finite()).max_by(largest),
    };
    match (target, fault) {
        (Some(last), Fault::Unwritten) => *last = f64::NAN,
        (Some(value), _) => *value = -3.0 * *value - 1.0,
        // Where there is nothing to write, any write is an overrun.
        (None, _) => guard[0] = -1.0,
    }
}
