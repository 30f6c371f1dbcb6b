//! Python's two ways to put values into a text: `'%s' % x` and `'{}'.format(x)`.

use super::call::Given;
use super::meter::{Meter, Res, fail};
use super::text::{float, repr, str_of};
use super::value::{SeqKind, Value, undefined};

/// The widest field or precision; wider ones are refused.
const MAX_WIDTH: usize = 10_000;

/// How one value is written.
#[derive(Debug, Default)]
struct Spec {
    fill: Option<char>,
    /// `<`, `>`, `^`, `=` or none.
    align: Option<char>,
    /// `+`, ` ` or none.
    sign: Option<char>,
    alternate: bool,
    zero: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

/// `pattern % value`.
pub(super) fn percent(pattern: &str, value: &Value, meter: &Meter) -> Res<Value> {
    let tuple = match value {
        Value::Seq(seq) if seq.kind == SeqKind::Tuple => Some(&seq.items),
        _ => None,
    };
    let single = std::slice::from_ref(value);
    let mut values = tuple.map_or(single, |items| &items[..]).iter();
    let mut used_mapping = false;
    let mut out = String::new();
    let mut chars = pattern.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut named = None;
        if chars.next_if_eq(&'(').is_some() {
            let name: String = chars.by_ref().take_while(|&c| c != ')').collect();
            let Value::Dict(dict) = value else {
                return fail("format requires a mapping");
            };
            used_mapping = true;
            named = match dict.get_str(&name) {
                Some(value) => Some(value.clone()),
                None => return fail(format!("'{name}'")),
            };
        }
        let mut spec = Spec::default();
        while let Some(flag) = chars.next_if(|c| "#0- +".contains(*c)) {
            match flag {
                '#' => spec.alternate = true,
                '0' => spec.zero = true,
                '-' => spec.align = Some('<'),
                flag => spec.sign = Some(flag),
            }
        }
        let size = |chars: &mut std::iter::Peekable<std::str::Chars>| {
            let mut digits = String::new();
            while let Some(digit) = chars.next_if(char::is_ascii_digit) {
                digits.push(digit);
            }
            match digits.parse() {
                _ if digits.is_empty() => Ok(0),
                Ok(size) if size <= MAX_WIDTH => Ok(size),
                _ => fail("width too big"),
            }
        };
        spec.width = size(&mut chars)?;
        if chars.next_if_eq(&'.').is_some() {
            spec.precision = Some(size(&mut chars)?);
        }
        let Some(kind) = chars.next() else {
            return fail("incomplete format");
        };
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match named.or_else(|| values.next().cloned()) {
            Some(value) => value,
            None => return fail("not enough arguments for format string"),
        };
        let text = percent_value(&value, kind, spec, meter)?;
        meter.bytes(text.len())?;
        out.push_str(&text);
    }
    let unused = values.next().is_some() && !used_mapping;
    if unused
        && (tuple.is_some()
            || !matches!(value, Value::Dict(_) | Value::Seq(_) | Value::Undefined(_)))
    {
        return fail("not all arguments converted during string formatting");
    }
    Value::text(meter, out)
}

fn percent_value(value: &Value, kind: char, mut spec: Spec, meter: &Meter) -> Res<String> {
    // Texts go to the right unless `-` says otherwise.
    let align = spec.align.or(Some('>'));
    match kind {
        's' | 'r' | 'a' => {
            let text = if kind == 's' {
                str_of(value, meter)?.to_string()
            } else {
                repr_of(value, meter)?
            };
            spec.align = align;
            spec.zero = false;
            Ok(pad(cut(text, spec.precision), &spec))
        }
        'c' => {
            let code = value.as_int().and_then(|code| u32::try_from(code).ok());
            let one = value.as_str().filter(|text| text.chars().count() == 1);
            match code
                .and_then(char::from_u32)
                .or(one.and_then(|text| text.chars().next()))
            {
                Some(c) => Ok(pad(c.to_string(), &Spec { align, ..spec })),
                None => fail("%c requires int or char"),
            }
        }
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            let number = match value {
                Value::Float(number) if "diu".contains(kind) => Some(*number as i128),
                other => other.as_int(),
            };
            let Some(number) = number else {
                return fail(format!(
                    "%{kind} format: a real number is required, not {}",
                    value.type_name()
                ));
            };
            spec.kind = Some(if "iu".contains(kind) { 'd' } else { kind });
            Ok(integer(number, &spec))
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            let Some(number) = value.as_float() else {
                return fail(format!("must be real number, not {}", value.type_name()));
            };
            spec.kind = Some(kind);
            Ok(real(number, &spec))
        }
        other => fail(format!("unsupported format character '{other}'")),
    }
}

fn repr_of(value: &Value, meter: &Meter) -> Res<String> {
    let mut out = String::new();
    repr(value, meter, &mut out)?;
    Ok(out)
}

fn cut(text: String, precision: Option<usize>) -> String {
    match precision {
        Some(precision) => text.chars().take(precision).collect(),
        None => text,
    }
}

/// `pattern.format(…)`.
pub(super) fn format(pattern: &str, given: &Given, meter: &Meter) -> Res<Value> {
    let mut out = String::new();
    let mut rest = pattern;
    let mut next = 0;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let brace = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(brace) {
            out.push_str(brace);
            rest = after;
            continue;
        }
        if brace == "}" {
            return fail("Single '}' encountered in format string");
        }
        let Some(end) = rest.find('}') else {
            return fail("Single '{' encountered in format string");
        };
        let field = &rest[..end];
        rest = &rest[end + 1..];
        if field.contains('{') {
            return fail("fields within fields are not supported in format strings");
        }
        let (path, spec) = field.split_once(':').unwrap_or((field, ""));
        let (path, conversion) = path.split_once('!').unwrap_or((path, ""));
        let value = field_value(path, given, &mut next)?;
        let text = match conversion {
            "r" | "a" => Value::str(repr_of(&value, meter)?),
            "s" => Value::Str(str_of(&value, meter)?),
            "" => value,
            _ => return fail("unknown conversion specifier"),
        };
        let text = format_value(&text, spec, meter)?;
        meter.bytes(text.len())?;
        out.push_str(&text);
    }
    out.push_str(rest);
    Value::text(meter, out)
}

fn field_value(path: &str, given: &Given, next: &mut usize) -> Res<Value> {
    let end = path.find(['.', '[']).unwrap_or(path.len());
    let (name, mut rest) = path.split_at(end);
    let mut value = if name.is_empty() || name.bytes().all(|b| b.is_ascii_digit()) {
        let index = if name.is_empty() {
            *next
        } else {
            name.parse().unwrap_or(usize::MAX)
        };
        *next += 1;
        match given.positional.get(index) {
            Some(value) => value.clone(),
            None => {
                return fail(format!(
                    "Replacement index {index} out of range for positional args tuple"
                ));
            }
        }
    } else {
        match given.named.iter().find(|(known, _)| **known == *name) {
            Some((_, value)) => value.clone(),
            None => return fail(format!("'{name}'")),
        }
    };
    while !rest.is_empty() {
        let (part, after) = match (rest.strip_prefix('['), rest.strip_prefix('.')) {
            (Some(inside), _) => match inside.split_once(']') {
                Some(split) => split,
                None => return fail("Missing ']' in format string"),
            },
            (None, Some(name)) => name.split_at(name.find(['.', '[']).unwrap_or(name.len())),
            _ => return fail("Only '.' or '[' may follow ']' in format field specifier"),
        };
        rest = after;
        let at = part.parse::<usize>().ok();
        let found = match &value {
            Value::Dict(dict) => dict.get_str(part).cloned(),
            Value::Seq(seq) => at.and_then(|at| seq.items.get(at).cloned()),
            Value::Str(text) => at
                .and_then(|at| text.chars().nth(at))
                .map(|c| Value::str(c.to_string())),
            Value::Undefined(message) => return undefined(message),
            _ => None,
        };
        let missing = || Value::Undefined(format!("no element '{part}'").into());
        value = found.unwrap_or_else(missing);
    }
    Ok(value)
}

fn parse_spec(text: &str) -> Res<Spec> {
    let mut spec = Spec::default();
    let mut chars = text.chars().peekable();
    let mut ahead = text.chars();
    let (first, second) = (ahead.next(), ahead.next());
    if second.is_some_and(|c| "<>^=".contains(c)) {
        (spec.fill, spec.align) = (first, second);
        chars = ahead.as_str().chars().peekable();
    } else if first.is_some_and(|c| "<>^=".contains(c)) {
        spec.align = chars.next();
    }
    spec.sign = chars.next_if(|c| "+- ".contains(*c)).filter(|&c| c != '-');
    spec.alternate = chars.next_if_eq(&'#').is_some();
    spec.zero = chars.next_if_eq(&'0').is_some();
    let mut digits = String::new();
    while let Some(digit) = chars.next_if(char::is_ascii_digit) {
        digits.push(digit);
    }
    spec.width = digits
        .parse()
        .unwrap_or(if digits.is_empty() { 0 } else { usize::MAX });
    spec.grouping = chars.next_if(|c| ",_".contains(*c));
    if chars.next_if_eq(&'.').is_some() {
        let mut digits = String::new();
        while let Some(digit) = chars.next_if(char::is_ascii_digit) {
            digits.push(digit);
        }
        match digits.parse() {
            Ok(precision) => spec.precision = Some(precision),
            Err(_) => return fail("Format specifier missing precision"),
        }
    }
    spec.kind = chars.next();
    if spec.width.max(spec.precision.unwrap_or(0)) > MAX_WIDTH {
        return fail("Too many decimal digits in format string");
    }
    if chars.next().is_some() {
        return fail("Invalid format specifier");
    }
    Ok(spec)
}

fn format_value(value: &Value, spec: &str, meter: &Meter) -> Res<String> {
    if spec.is_empty() {
        return Ok(str_of(value, meter)?.to_string());
    }
    let spec = parse_spec(spec)?;
    let unknown = |kind: char| {
        let name = value.type_name();
        fail(format!(
            "Unknown format code '{kind}' for object of type '{name}'"
        ))
    };
    match (value, spec.kind) {
        (Value::Str(_), None | Some('s')) if spec.grouping.is_some() || spec.sign.is_some() => {
            fail("sign or grouping not allowed in string format specifier")
        }
        (Value::Str(text), None | Some('s')) => {
            Ok(pad(cut(text.to_string(), spec.precision), &spec))
        }
        (Value::Int(_) | Value::Bool(_), None | Some('d' | 'n' | 'x' | 'X' | 'o' | 'b')) => {
            match spec.precision {
                Some(_) => fail("Precision not allowed in integer format specifier"),
                None => Ok(integer(value.as_int().unwrap_or(0), &spec)),
            }
        }
        (
            Value::Int(_) | Value::Float(_) | Value::Bool(_),
            Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%'),
        )
        | (Value::Float(_), None) => Ok(real(value.as_float().unwrap_or(0.0), &spec)),
        (_, Some(kind)) => unknown(kind),
        _ => fail(format!(
            "unsupported format string passed to {}.__format__",
            value.type_name()
        )),
    }
}

fn signed(negative: bool, digits: &str, spec: &Spec) -> String {
    let sign = if negative {
        "-"
    } else {
        spec.sign.map_or("", |c| if c == '+' { "+" } else { " " })
    };
    let numeric = spec.align.is_none() && spec.zero || spec.align == Some('=');
    if numeric {
        let fill = if spec.zero && spec.align.is_none() {
            '0'
        } else {
            spec.fill.unwrap_or(' ')
        };
        let missing = spec
            .width
            .saturating_sub(sign.len() + digits.chars().count());
        let filler: String = std::iter::repeat_n(fill, missing).collect();
        return format!("{sign}{filler}{digits}");
    }
    let align = spec.align.or(Some('>'));
    pad(
        format!("{sign}{digits}"),
        &Spec {
            align,
            fill: spec.fill,
            width: spec.width,
            ..Spec::default()
        },
    )
}

fn grouped(digits: &str, separator: Option<char>) -> String {
    let Some(separator) = separator else {
        return digits.to_owned();
    };
    let (whole, rest) = digits.split_at(digits.find('.').unwrap_or(digits.len()));
    let mut out = String::new();
    for (at, c) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at) % 3 == 0 {
            out.push(separator);
        }
        out.push(c);
    }
    out + rest
}

fn integer(number: i128, spec: &Spec) -> String {
    let size = number.unsigned_abs();
    let (prefix, digits) = match spec.kind {
        Some('x') => ("0x", format!("{size:x}")),
        Some('X') => ("0X", format!("{size:X}")),
        Some('o') => ("0o", format!("{size:o}")),
        Some('b') => ("0b", format!("{size:b}")),
        _ => ("", size.to_string()),
    };
    let digits = match spec.precision {
        Some(least) if digits.len() < least => format!("{digits:0>least$}"),
        _ => grouped(&digits, spec.grouping),
    };
    let prefix = if spec.alternate { prefix } else { "" };
    signed(number < 0, &format!("{prefix}{digits}"), spec)
}

fn real(number: f64, spec: &Spec) -> String {
    let size = number.abs();
    let precision = spec.precision.unwrap_or(6);
    let kind = spec.kind.unwrap_or('\0');
    let digits = if !size.is_finite() {
        if size.is_nan() {
            "nan".into()
        } else {
            "inf".to_owned()
        }
    } else {
        match kind {
            'f' | 'F' => format!("{size:.precision$}"),
            '%' => format!("{:.precision$}%", size * 100.0),
            'e' | 'E' => exponential(size, precision),
            'g' | 'G' => general(size, precision.max(1), spec.alternate),
            _ => match spec.precision {
                None => float(size),
                Some(precision) => general(size, precision.max(1), false),
            },
        }
    };
    let digits = if kind.is_ascii_uppercase() {
        digits.to_uppercase()
    } else {
        digits
    };
    let negative = number.is_sign_negative() && !number.is_nan();
    signed(negative, &grouped(&digits, spec.grouping), spec)
}

/// `d.ddde+XX`.
fn exponential(size: f64, precision: usize) -> String {
    let text = format!("{size:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// `%g`: as few digits as needed, with an exponent where the number is far from one.
fn general(size: f64, precision: usize, keep_zeros: bool) -> String {
    let text = format!("{size:.*e}", precision - 1);
    let exponent: i32 = text
        .split_once('e')
        .and_then(|(_, e)| e.parse().ok())
        .unwrap_or(0);
    let trim = |digits: &str| match digits.contains('.') && !keep_zeros {
        true => digits
            .trim_end_matches('0')
            .trim_end_matches('.')
            .to_owned(),
        false => digits.to_owned(),
    };
    if exponent < -4 || exponent >= precision as i32 {
        let text = exponential(size, precision - 1);
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "+00"));
        return format!("{}e{exponent}", trim(digits));
    }
    let decimals = (precision as i32 - 1 - exponent).max(0) as usize;
    trim(&format!("{size:.decimals$}"))
}

fn pad(text: String, spec: &Spec) -> String {
    let missing = spec.width.saturating_sub(text.chars().count());
    if missing == 0 {
        return text;
    }
    let fill = spec.fill.unwrap_or(' ');
    let filler = |count: usize| -> String { std::iter::repeat_n(fill, count).collect() };
    match spec.align {
        Some('>') => filler(missing) + &text,
        Some('^') => filler(missing / 2) + &text + &filler(missing - missing / 2),
        _ => text + &filler(missing),
    }
}
