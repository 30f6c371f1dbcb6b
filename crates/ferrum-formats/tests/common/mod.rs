//! Bytes of GGUF and safetensors files put together by hand, wrong ones included.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "a module of several tests, each of which uses its part"
)]

use ferrum_formats::gguf::{ArrayBuf, Writer};
use ferrum_types::GgufQuantType;
use std::path::{Path, PathBuf};

/// A GGUF header with nothing checked.
#[derive(Clone, Default)]
pub struct Raw {
    pairs: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    pub pair_count: Option<u64>,
    pub tensor_count: Option<u64>,
    pub version: Option<u32>,
    pub magic: Option<[u8; 4]>,
    pub data: Vec<u8>,
    pub alignment: usize,
}

pub fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

impl Raw {
    pub fn pair(mut self, key: &str, ty: u32, value: &[u8]) -> Self {
        self.pairs.push(
            [
                string(key.as_bytes()),
                ty.to_le_bytes().to_vec(),
                value.to_vec(),
            ]
            .concat(),
        );
        self
    }

    /// `dims` innermost first, as in the file.
    pub fn tensor(mut self, name: &str, dims: &[u64], ty: u32, offset: u64) -> Self {
        let mut entry = string(name.as_bytes());
        entry.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|d| entry.extend(d.to_le_bytes()));
        entry.extend(ty.to_le_bytes());
        entry.extend(offset.to_le_bytes());
        self.tensors.push(entry);
        self
    }

    pub fn data(mut self, len: usize) -> Self {
        self.data = vec![7; len];
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.unwrap_or(*b"GGUF").to_vec();
        out.extend(self.version.unwrap_or(3).to_le_bytes());
        out.extend(
            self.tensor_count
                .unwrap_or(self.tensors.len() as u64)
                .to_le_bytes(),
        );
        out.extend(
            self.pair_count
                .unwrap_or(self.pairs.len() as u64)
                .to_le_bytes(),
        );
        out.extend(self.pairs.concat());
        out.extend(self.tensors.concat());
        let alignment = if self.alignment == 0 {
            32
        } else {
            self.alignment
        };
        out.resize(out.len().next_multiple_of(alignment), 0);
        out.extend(&self.data);
        out
    }
}

/// A small valid GGUF file with every kind of thing in it.
pub fn small_gguf() -> Vec<u8> {
    let mut w = Writer::new("small.gguf");
    w.set("general.architecture", "llama").unwrap();
    w.set("general.alignment", 64u32).unwrap();
    w.set("llama.block_count", 2u64).unwrap();
    w.set("a.f", 0.5f32).unwrap();
    w.set("a.d", 0.25f64).unwrap();
    w.set("a.b", true).unwrap();
    w.set("a.i", -3i8).unwrap();
    w.set("tokens", &ArrayBuf::from_strs(["<s>", "é", ""]))
        .unwrap();
    w.set("types", &ArrayBuf::from_numbers([1i32, -2, 3]))
        .unwrap();
    w.set("flags", &ArrayBuf::from_numbers([true, false]))
        .unwrap();
    let inner = [ArrayBuf::from_strs(["x"]), ArrayBuf::from_numbers([1u16])];
    w.set("nested", &ArrayBuf::from_arrays(&inner)).unwrap();
    w.declare("a.weight", &[2, 3], GgufQuantType::F32).unwrap();
    w.declare("b.weight", &[2, 32], GgufQuantType::Q8_0)
        .unwrap();
    w.declare("scalar", &[], GgufQuantType::F16).unwrap();
    let mut body = w.start(Vec::new()).unwrap();
    body.push("a.weight", &(0u8..24).collect::<Vec<_>>())
        .unwrap();
    body.push("b.weight", &[1; 34]).unwrap();
    body.push("b.weight", &[2; 34]).unwrap();
    body.push("scalar", &[9, 9]).unwrap();
    body.finish().unwrap()
}

/// A safetensors file of this header, with `data` zero bytes after it.
pub fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut out = string(header.as_bytes());
    out.resize(out.len() + data, 0);
    out
}

/// A folder beside the workspace (`../shared/…`), if it is there.
pub fn shared(folder: &str) -> Option<PathBuf> {
    let root = workspace_root();
    let dir = root.parent()?.join("shared").join(folder);
    dir.is_dir().then_some(dir)
}

pub fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

/// The files below `dir` with this extension.
pub fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|e| e == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}
