//! Which element each role of a [`Reference`](super::Reference) has.
//!
//! The reference computes in f64 whatever its elements are, so one that rounds its activations shows what a device
//! with such activations may at best give.

use ferrum_types::FloatElement;
use std::fmt::Debug;
use std::marker::PhantomData;

/// The elements of a backend by role.
pub trait Precision: Copy + Debug + PartialEq + Send + Sync + 'static {
    /// As [`Backend::Act`](crate::Backend::Act).
    type Act: FloatElement;
    /// As [`Backend::Residual`](crate::Backend::Residual).
    type Residual: FloatElement;
    /// As [`Backend::Logit`](crate::Backend::Logit).
    type Logit: FloatElement;
}

/// One element for all roles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Uniform<T>(PhantomData<T>);

impl<T: FloatElement> Precision for Uniform<T> {
    type Act = T;
    type Residual = T;
    type Logit = T;
}

/// Activations of one element, residual stream and logits in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixed<T>(PhantomData<T>);

impl<T: FloatElement> Precision for Mixed<T> {
    type Act = T;
    type Residual = f32;
    type Logit = f32;
}

/// An element as the reference computes with it.
pub(super) fn wide(x: impl FloatElement) -> f64 {
    f64::from(x.to_f32())
}

/// The one rounding at the end of an op.
pub(super) fn narrow<T: FloatElement>(x: f64) -> T {
    T::from_f32(x as f32)
}
