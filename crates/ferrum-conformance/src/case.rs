//! Cases: what they are called, how they run, and where their expectation comes from.

use crate::compare::{Tolerance, compare, compare_rows};
use crate::data::Rng;
use crate::io::{CaseError, Check, Fault, Io, Output, Refusals, wrong};
use crate::report::{Outcome, Report};
use ferrum_kernels::{Backend, reference::ReferenceBackend};
use ferrum_types::{Element, Error, FloatElement};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// One thing that the suite asks of a backend.
pub struct Case<B: Backend> {
    /// Op of the contract.
    pub op: &'static str,
    /// Element type of what the op works on.
    pub dtype: &'static str,
    /// Shape and values.
    pub name: String,
    /// Whether it compares numbers, so that a tampered result must fail it.
    pub compares: bool,
    run: Run<B>,
}

type Run<B> = Box<dyn Fn(&B, Fault) -> Check<f64>>;

/// Makes the input of a case.
type Make<D> = Box<dyn Fn(&mut Rng) -> D>;

impl<B: Backend> Case<B> {
    /// Runs the case on `device`. A panic of the backend is a failure of the case.
    pub fn run(&self, device: &B) -> Outcome {
        self.run_with(device, Fault::None)
    }

    /// [`run`](Self::run), with a result that was tampered with.
    pub(crate) fn run_with(&self, device: &B, fault: Fault) -> Outcome {
        // The case owns nothing that outlives a panic, and the device is what is being tested.
        match catch_unwind(AssertUnwindSafe(|| (self.run)(device, fault))) {
            Ok(Ok(nmse)) => Outcome::Passed { nmse },
            Ok(Err(CaseError::Wrong(reason))) => Outcome::Failed(reason),
            Ok(Err(CaseError::Error(error @ Error::Unsupported { .. }))) => {
                Outcome::Skipped(error.to_string())
            }
            Ok(Err(CaseError::Error(error))) => Outcome::Failed(format!("error: {error}")),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
                Outcome::Failed(format!("panicked: {}", text.unwrap_or("without a message")))
            }
        }
    }
}

/// Which cases to run.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    text: String,
    /// One of so many parts.
    part: Option<(u64, u64)>,
}

impl Filter {
    /// Every case.
    pub fn all() -> Self {
        Self::default()
    }

    /// The cases whose `op dtype name` contains `text`.
    pub fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            part: None,
        }
    }

    /// Part `part` of `parts` of these cases, as even as their names fall: for tests that run beside each other.
    pub fn part(self, part: u64, parts: u64) -> Self {
        Self {
            part: Some((part, parts)),
            ..self
        }
    }

    /// Whether `case` is wanted.
    pub fn matches<B: Backend>(&self, case: &Case<B>) -> bool {
        let Case {
            op, dtype, name, ..
        } = case;
        let label = format!("{op} {dtype} {name}");
        let in_part = self.part.is_none_or(|(part, parts)| {
            let mut hasher = DefaultHasher::new();
            label.hash(&mut hasher);
            hasher.finish() % parts == part
        });
        in_part && label.contains(&self.text)
    }
}

/// A list of cases that is being put together.
pub(crate) struct Cases<B: Backend> {
    pub(crate) list: Vec<Case<B>>,
}

/// What a case is called and how close it must come.
pub(crate) struct Label {
    pub(crate) op: &'static str,
    pub(crate) dtype: &'static str,
    pub(crate) name: String,
    pub(crate) tolerance: Tolerance,
}

/// A [`Label`] with a formatted name.
pub(crate) fn label(
    op: &'static str,
    dtype: &'static str,
    tolerance: Tolerance,
    name: impl Into<String>,
) -> Label {
    Label {
        op,
        dtype,
        name: name.into(),
        tolerance,
    }
}

/// Three implementations of an op: on the backend under test, on the reference, and as a
/// formula. `D` is the op's input on the host.
pub(crate) struct OpImplementations<B: Backend, D> {
    pub(crate) run: fn(&mut Io<'_, B>, &D) -> Check,
    pub(crate) reference: fn(&mut Io<'_, ReferenceBackend>, &D) -> Check,
    pub(crate) formula: fn(&D) -> Vec<Vec<f64>>,
}

/// The [`OpImplementations`] of the generic function `$run` and of `$formula`.
macro_rules! implementations {
    ($run:ident, $formula:expr) => {
        $crate::case::OpImplementations {
            run: $run::<B>,
            reference: $run::<ferrum_kernels::reference::ReferenceBackend>,
            formula: $formula,
        }
    };
    ($run:ident, $k:ident, $formula:expr) => {
        $crate::case::OpImplementations {
            run: $run::<B, $k>,
            reference: $run::<ferrum_kernels::reference::ReferenceBackend, $k>,
            formula: $formula,
        }
    };
}
pub(crate) use implementations;

/// The generic function `$run` for the backend under test and for the reference.
macro_rules! both {
    ($run:ident $(, $k:ident)?) => {
        (
            $run::<B $(, $k)?>,
            $run::<ferrum_kernels::reference::ReferenceBackend $(, $k)?>,
        )
    };
}
pub(crate) use both;

/// What a case runs with a backend's buffers.
pub(crate) type WithIo<B, D> = fn(&mut Io<'_, B>, &D) -> Check;

/// What a case asks a backend to refuse.
pub(crate) type Refuse<B> = fn(&B, &mut Refusals) -> Check;

impl<B: Backend> Cases<B> {
    pub(crate) fn new() -> Self {
        Cases { list: Vec::new() }
    }

    fn push(
        &mut self,
        (op, dtype, name): (&'static str, &'static str, String),
        compares: bool,
        run: Run<B>,
    ) {
        self.list.push(Case {
            op,
            dtype,
            name,
            compares,
            run,
        });
    }

    /// A result against its expectation: that of the reference backend, or of the formula when it
    /// is the reference backend that is tested.
    pub(crate) fn add<D: 'static>(
        &mut self,
        label: Label,
        make: impl Fn(&mut Rng) -> D + 'static,
        implementations: OpImplementations<B, D>,
    ) {
        self.add_boxed(label, Box::new(make), implementations);
    }

    /// [`add`](Self::add), compiled once for each type of input and not for each case.
    fn add_boxed<D: 'static>(
        &mut self,
        label: Label,
        make: Make<D>,
        implementations: OpImplementations<B, D>,
    ) {
        let Label {
            op,
            dtype,
            name,
            tolerance,
        } = label;
        let seed = format!("{op} {dtype} {name}");
        let run = move |device: &B, fault| {
            let data = make(&mut Rng::new(&seed, round::<B>));
            let found = outputs(device, fault, &data, implementations.run)?;
            let expected = if B::NAME == ReferenceBackend::NAME {
                (implementations.formula)(&data)
            } else {
                let reference = ReferenceBackend::new();
                let outputs = outputs(&reference, Fault::None, &data, implementations.reference)?;
                values(outputs)
            };
            compare_all(&found, expected, tolerance).map_err(CaseError::Wrong)
        };
        self.push((op, dtype, name), true, Box::new(run));
    }

    /// Two ways to one result, which must have the same bits, or be as near as the backend says.
    pub(crate) fn same<D: 'static>(
        &mut self,
        name: (&'static str, &'static str, &str),
        make: impl Fn(&mut Rng) -> D + 'static,
        one: WithIo<B, D>,
        other: WithIo<B, D>,
    ) {
        self.same_boxed(name, Box::new(make), one, other);
    }

    /// [`same`](Self::same), compiled once for each type of input and not for each case.
    fn same_boxed<D: 'static>(
        &mut self,
        (op, dtype, name): (&'static str, &'static str, &str),
        make: Make<D>,
        one: WithIo<B, D>,
        other: WithIo<B, D>,
    ) {
        let seed = format!("{op} {dtype} {name}");
        let run = move |device: &B, fault| {
            let data = make(&mut Rng::new(&seed, round::<B>));
            let a = values(outputs(device, fault, &data, one)?).concat();
            let b = values(outputs(device, Fault::None, &data, other)?).concat();
            compare_rows(device.batch_invariance(), &a, &b).map_err(CaseError::Wrong)
        };
        self.push((op, dtype, name.to_owned()), true, Box::new(run));
    }

    /// Checks that a buffer one element too short is refused, each in turn: with [`Error::Shape`], the same as on
    /// the reference.
    pub(crate) fn rejects_short_buffers<D: 'static>(
        &mut self,
        name: (&'static str, &'static str),
        make: impl Fn(&mut Rng) -> D + 'static,
        implementations: (WithIo<B, D>, WithIo<ReferenceBackend, D>),
    ) {
        self.rejects_short_buffers_boxed(name, Box::new(make), implementations);
    }

    /// [`rejects_short_buffers`](Self::rejects_short_buffers), compiled once for each type of input and not for each case.
    fn rejects_short_buffers_boxed<D: 'static>(
        &mut self,
        (op, dtype): (&'static str, &'static str),
        make: Make<D>,
        (run, reference): (WithIo<B, D>, WithIo<ReferenceBackend, D>),
    ) {
        let name = "a buffer too short";
        let case = move |device: &B, _| {
            let data = make(&mut Rng::new(&format!("{op} {dtype} {name}"), round::<B>));
            let mut io = Io::new(device, Fault::None)?;
            run(&mut io, &data)?;
            for (i, buffer) in io.checked().iter().enumerate() {
                let found = run(&mut Io::shortened(device, i)?, &data);
                let expected = reference(&mut Io::shortened(&ReferenceBackend::new(), i)?, &data);
                same_shape_error(buffer, found, expected)?;
            }
            Ok(0.0)
        };
        self.push((op, dtype, name.to_owned()), false, Box::new(case));
    }

    /// Arguments that every backend refuses with the same error as the reference.
    pub(crate) fn refuses(
        &mut self,
        (op, dtype, name): (&'static str, &'static str, &str),
        (run, reference): (Refuse<B>, Refuse<ReferenceBackend>),
    ) {
        let case = move |device: &B, _| {
            let (mut found, mut expected) = (Refusals::default(), Refusals::default());
            run(device, &mut found)?;
            reference(&ReferenceBackend::new(), &mut expected)?;
            found.compare(&expected)?;
            Ok(0.0)
        };
        self.push((op, dtype, name.to_owned()), false, Box::new(case));
    }

    /// Anything else that is right or wrong.
    pub(crate) fn check(
        &mut self,
        (op, dtype, name): (&'static str, &'static str, &str),
        run: impl Fn(&B) -> Check + 'static,
    ) {
        let case = move |device: &B, _| {
            run(device)?;
            Ok(0.0)
        };
        self.push((op, dtype, name.to_owned()), false, Box::new(case));
    }

    /// Runs the cases that `filter` wants.
    pub(crate) fn run(self, device: &B, filter: &Filter, report: &mut Report) {
        for case in self.list {
            if filter.matches(&case) {
                let outcome = case.run(device);
                report.add(case.op, case.dtype, case.name, outcome);
            }
        }
    }

    /// Reports the cases that `filter` wants as skipped.
    pub(crate) fn skip(self, reason: &str, filter: &Filter, report: &mut Report) {
        for case in self.list {
            if filter.matches(&case) {
                let outcome = Outcome::Skipped(reason.to_owned());
                report.add(case.op, case.dtype, case.name, outcome);
            }
        }
    }
}

/// `x` as an activation of `B` holds it.
fn round<B: Backend>(x: f32) -> f32 {
    B::Act::from_f32(x).to_f32()
}

fn outputs<B: Backend, D>(
    device: &B,
    fault: Fault,
    data: &D,
    run: fn(&mut Io<'_, B>, &D) -> Check,
) -> Check<Vec<Output>> {
    let mut io = Io::new(device, fault)?;
    run(&mut io, data)?;
    Ok(io.outputs)
}

fn values(outputs: Vec<Output>) -> Vec<Vec<f64>> {
    outputs.into_iter().map(|output| output.values).collect()
}

/// Fails unless both results of an op whose `buffer` was too short are the same [`Error::Shape`].
fn same_shape_error(buffer: &str, found: Check, expected: Check) -> Check {
    let found = match found {
        Err(CaseError::Error(error @ Error::Shape { .. })) => error,
        other => {
            let found = match other {
                Err(CaseError::Error(error)) => format!("the error \"{error}\""),
                Ok(()) | Err(CaseError::Wrong(_)) => "no error".to_owned(),
            };
            return wrong(format!(
                "{buffer} one element too short gave {found}, expected a shape error"
            ));
        }
    };
    match expected {
        Err(CaseError::Error(expected)) if expected == found => Ok(()),
        other => wrong(format!(
            "{buffer} one element too short gave \"{found}\", the reference gives {other:?}"
        )),
    }
}

/// The worst NMSE of all outputs.
fn compare_all(
    found: &[Output],
    expected: Vec<Vec<f64>>,
    tolerance: Tolerance,
) -> Result<f64, String> {
    if found.len() != expected.len() {
        let (found, expected) = (found.len(), expected.len());
        return Err(format!(
            "the case has {found} outputs and {expected} expectations"
        ));
    }
    let mut worst = 0.0f64;
    for (output, mut expected) in found.iter().zip(expected) {
        for x in &mut expected {
            *x = (output.round)(*x);
        }
        let tolerance = tolerance.for_element(output.dtype);
        let nmse = compare(output.name, &output.values, &expected, tolerance)?;
        worst = worst.max(nmse);
    }
    Ok(worst)
}

/// Name of the backend's activations.
pub(crate) fn act_name<B: Backend>() -> &'static str {
    B::Act::DTYPE.name()
}
