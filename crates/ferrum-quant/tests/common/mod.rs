//! Reads the fixtures of `fixtures/quant/`, which are safetensors files.

use std::path::Path;

/// One fixture file in memory.
pub(crate) struct Fixture {
    data: Vec<u8>,
}

impl Fixture {
    /// `fixtures/quant/<name>.safetensors`.
    pub(crate) fn load(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../fixtures/quant")
            .join(name)
            .with_extension("safetensors");
        let data = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Fixture { data }
    }

    /// The bytes of a tensor.
    pub(crate) fn bytes(&self, tensor: &str) -> &[u8] {
        let file = safetensors::SafeTensors::deserialize(&self.data).expect("a safetensors file");
        let view = file
            .tensor(tensor)
            .unwrap_or_else(|e| panic!("{tensor}: {e}"));
        view.data()
    }

    /// A tensor as numbers, copied so that they are aligned.
    pub(crate) fn typed<T: bytemuck::Pod>(&self, tensor: &str) -> Vec<T> {
        let bytes = self.bytes(tensor).chunks_exact(size_of::<T>());
        bytes.map(bytemuck::pod_read_unaligned).collect()
    }
}
