//! `multipart/form-data` bodies (RFC 7578), which are in memory as a whole: fields and one file.

use crate::error::ApiError;
use std::ops::Range;

/// Most parts of a form.
const MAX_PARTS: usize = 64;

/// Longest value of a field that is no file.
const MAX_FIELD: usize = 64 << 10;

/// A parsed form.
#[derive(Debug, Default)]
pub(crate) struct Form {
    fields: Vec<(String, String, bool)>,
    /// Where the bytes of the field `file` are.
    file: Option<Range<usize>>,
}

/// The boundary that a content type names.
pub(crate) fn boundary(kind: &str) -> Option<&str> {
    let (kind, parameters) = kind.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let mut parameters = parameters.split(';').filter_map(|one| one.split_once('='));
    let (_, value) = parameters.find(|(name, _)| name.trim().eq_ignore_ascii_case("boundary"))?;
    let value = value.trim().trim_matches('"');
    (1..=70).contains(&value.len()).then_some(value)
}

fn find(bytes: &[u8], word: &[u8]) -> Option<usize> {
    let first = *word.first()?;
    let mut from = 0;
    // The first byte of a boundary's line is rare, and one byte is found fast.
    while let Some(at) = bytes[from..].iter().position(|&byte| byte == first) {
        let at = from + at;
        if bytes[at..].starts_with(word) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

impl Form {
    /// Takes a body apart.
    ///
    /// # Errors
    /// 400 for what is no form, or has several files, too many or too long fields.
    pub(crate) fn read(bytes: &[u8], boundary: &str) -> Result<Self, ApiError> {
        let broken =
            || ApiError::malformed("the body is not the multipart form that its type says");
        let line = format!("\r\n--{boundary}");
        // The first one has no line before it.
        let mut at = match bytes.starts_with(&line.as_bytes()[2..]) {
            true => line.len() - 2,
            false => find(bytes, line.as_bytes()).ok_or_else(broken)? + line.len(),
        };
        let mut form = Self::default();
        for _ in 0..MAX_PARTS {
            let rest = &bytes[at..];
            if rest.starts_with(b"--") {
                return Ok(form);
            }
            let head = rest.strip_prefix(b"\r\n").ok_or_else(broken)?;
            let end = find(head, b"\r\n\r\n").ok_or_else(broken)?;
            let begin = at + 2 + end + 4;
            let length = find(&bytes[begin..], line.as_bytes()).ok_or_else(broken)?;
            let name = name_of(&head[..end]).ok_or_else(broken)?;
            form.add(name, bytes, begin..begin + length)?;
            at = begin + length + line.len();
        }
        Err(ApiError::malformed(format!(
            "the body has more than {MAX_PARTS} fields"
        )))
    }

    fn add(&mut self, name: String, bytes: &[u8], value: Range<usize>) -> Result<(), ApiError> {
        if name == "file" {
            if self.file.replace(value).is_some() {
                let reason = "found more than one, expected a request for each";
                return Err(ApiError::invalid(name, reason));
            }
            return Ok(());
        }
        if value.len() > MAX_FIELD {
            let reason = format!("found {} bytes, expected at most {MAX_FIELD}", value.len());
            return Err(ApiError::invalid(name, reason));
        }
        let text = String::from_utf8(bytes[value].to_vec());
        let text = text.map_err(|_| ApiError::invalid(&name, "it is not UTF-8"))?;
        self.fields.push((name, text, false));
        Ok(())
    }

    /// The last value of a field; an empty one is as good as none.
    pub(crate) fn text(&mut self, name: &str) -> Option<String> {
        let mut found = None;
        for (field, value, taken) in &mut self.fields {
            if field == name {
                *taken = true;
                found = Some(value.clone()).filter(|value| !value.is_empty());
            }
        }
        found
    }

    /// All values of a field.
    pub(crate) fn list(&mut self, name: &str) -> Vec<String> {
        let mut found = Vec::new();
        for (field, value, taken) in &mut self.fields {
            if field == name {
                *taken = true;
                found.push(value.clone());
            }
        }
        found
    }

    /// Where the file is in the body.
    ///
    /// # Errors
    /// 400 without one.
    pub(crate) fn file(&self) -> Result<Range<usize>, ApiError> {
        let missing = || ApiError::invalid("file", "it is missing");
        self.file.clone().ok_or_else(missing)
    }

    /// Fields that were not read.
    pub(crate) fn ignored(&self) -> Vec<String> {
        let rest = self.fields.iter().filter(|(_, _, taken)| !taken);
        rest.map(|(name, ..)| name.clone()).collect()
    }
}

/// The name of a part, by its head.
fn name_of(head: &[u8]) -> Option<String> {
    let head = std::str::from_utf8(head).ok()?;
    let mut lines = head.split("\r\n").filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(name, _)| name.eq_ignore_ascii_case("content-disposition"))?;
    let mut parameters = value.split(';').filter_map(|one| one.split_once('='));
    let (_, name) = parameters.find(|(name, _)| name.trim().eq_ignore_ascii_case("name"))?;
    let name = name.trim().trim_matches('"');
    (name.len() <= 80).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_taken_apart() {
        let body = b"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a;b.wav\"\r\nContent-Type: x\r\n\r\n\
            \r\n--c\r\n\xff\r\n--b\r\ncontent-disposition: form-data; name=model\r\n\r\nw\r\n--b\r\n\
            Content-Disposition: form-data; name=\"x\"\r\n\r\n\r\n--b--\r\n";
        let mut form = Form::read(body, "b").unwrap();
        assert_eq!(&body[form.file().unwrap()], b"\r\n--c\r\n\xff");
        assert_eq!(form.text("model").as_deref(), Some("w"));
        assert_eq!(form.ignored(), ["x"]);
        assert_eq!(
            (form.text("x"), form.list("x")),
            (None, vec![String::new()])
        );
    }

    #[test]
    fn what_is_no_form_is_refused() {
        for body in [
            &b""[..],
            b"--b",
            b"--b\r\n",
            b"--b\r\n\r\n\r\n--b--",
            b"--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nno end",
            b"--bx\r\n\r\n",
            b"nothing of it",
        ] {
            assert!(Form::read(body, "b").is_err(), "{body:?}");
        }
        let part = "--b\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n";
        let many = part.repeat(MAX_PARTS + 1) + "--b--";
        assert!(Form::read(many.as_bytes(), "b").is_err());
        let file = "--b\r\nContent-Disposition: form-data; name=file\r\n\r\n1\r\n";
        assert!(Form::read(format!("{file}--b--").as_bytes(), "b").is_ok());
        assert!(Form::read(format!("{file}{file}--b--").as_bytes(), "b").is_err());
        let parts = [
            ("multipart/form-data; boundary=b", Some("b")),
            (
                "Multipart/Form-Data; charset=x; Boundary=\"b c\"",
                Some("b c"),
            ),
            ("multipart/form-data", None),
            ("multipart/form-data; boundary=", None),
            ("application/json; boundary=b", None),
        ];
        for (kind, expected) in parts {
            assert_eq!(boundary(kind), expected, "{kind}");
        }
    }
}
