//! Models in several GGUF files, as `llama-gguf-split` cuts them: `NAME-00001-of-00003.gguf` has the
//! metadata, and each of the files some of the tensors.

use super::Gguf;
use crate::error::Shown;
use crate::tensor::TensorSource;
use crate::{FormatError, Result};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Most files of a model; the name has five digits for their number.
const MAX_PARTS: usize = 99_999;

impl Gguf {
    /// Opens the other files of a model that this is the first of, if there are any. They lie beside it.
    ///
    /// # Errors
    /// [`FormatError::Source`] when this is another than the first or is called otherwise than parts are, or
    /// when a file is missing or is another part; what is wrong with one of them; a tensor twice.
    pub(crate) fn with_parts(mut self) -> Result<Self> {
        let count = self.usize("split.count")?.unwrap_or(1);
        if count <= 1 {
            return Ok(self);
        }
        if count > MAX_PARTS {
            let expected = format!("at most {MAX_PARTS}");
            return Err(FormatError::field(
                &self.path,
                "split.count",
                count,
                expected,
            ));
        }
        let number = self.usize("split.no")?.unwrap_or(0);
        let own = part_path(&self.path, number, count);
        let wrong = |reason: String, hint: String| FormatError::source(&self.path, reason, hint);
        let first =
            own.and_then(|(stem, own)| (own == self.path).then(|| stem.join_number(0, count)));
        let Some(first) = first else {
            let name = format!("NAME-{:05}-of-{count:05}.gguf", number.saturating_add(1));
            let reason = format!(
                "is part {} of {count} and not called so",
                number.saturating_add(1)
            );
            return Err(wrong(reason, format!("call it {name}, beside the others")));
        };
        if number != 0 {
            let reason = format!("is part {} of {count} of a model", number + 1);
            return Err(wrong(
                reason,
                format!("open the first part, {}", first.display()),
            ));
        }
        let mut names: HashSet<String> = self.tensors.infos().map(|i| i.name.clone()).collect();
        let mut parts = Vec::new();
        for number in 1..count {
            let part = open_part(&self.path, number, count)?;
            for info in part.infos() {
                if !names.insert(info.name.clone()) {
                    return Err(FormatError::duplicate(&part.path, "tensor", &info.name));
                }
            }
            parts.push(part);
        }
        if let Some(promised) = self.usize("split.tensors.count")?
            && promised != names.len()
        {
            let found = format!("{promised}, and the parts have {}", names.len());
            let expected = "the number of their tensors";
            return Err(FormatError::field(
                &self.path,
                "split.tensors.count",
                found,
                expected,
            ));
        }
        self.parts = parts;
        Ok(self)
    }
}

/// What all parts of a model are called, less the numbers.
struct Stem {
    dir: PathBuf,
    name: String,
}

impl Stem {
    fn join_number(&self, number: usize, count: usize) -> PathBuf {
        let name = format!("{}-{:05}-of-{count:05}.gguf", self.name, number + 1);
        self.dir.join(name)
    }
}

/// The stem of a path, and what the path should be for part `number`; `None` for a name that no part has.
fn part_path(path: &Path, number: usize, count: usize) -> Option<(Stem, PathBuf)> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (stem, digits) = stem.rsplit_once('-')?;
    if digits.len() != 5 {
        return None;
    }
    let stem = Stem {
        dir: path.parent().map(Path::to_owned).unwrap_or_default(),
        name: stem.to_owned(),
    };
    let own = stem.join_number(number, count);
    Some((stem, own))
}

fn open_part(first: &Path, number: usize, count: usize) -> Result<Gguf> {
    let part = part_path(first, number, count);
    // Its own name was such a one.
    let path = part.map(|(_, path)| path).unwrap_or_default();
    if !path.exists() {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let reason = format!("needs its part \"{}\", which is not there", Shown(&name));
        let hint = "the download is incomplete, fetch the missing file";
        return Err(FormatError::source(first, reason, hint));
    }
    let gguf = Gguf::open(&path)?;
    let says = (gguf.usize("split.no")?, gguf.usize("split.count")?);
    if says != (Some(number), Some(count)) {
        let reason = format!("does not say that it is part {} of {count}", number + 1);
        let hint = "it belongs to another model, fetch it again";
        return Err(FormatError::source(&path, reason, hint));
    }
    Ok(gguf)
}
