//! Memory.

use crate::backend::DeviceBuffer;
use ferrum_types::Element;

/// Host memory for elements of one type.
#[derive(Clone, Debug, PartialEq)]
pub struct RefBuffer<T>(pub(super) Vec<T>);

impl<T: Element> DeviceBuffer for RefBuffer<T> {
    fn len(&self) -> usize {
        self.0.len()
    }
}
