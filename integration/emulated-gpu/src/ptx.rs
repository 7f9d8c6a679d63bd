//! The little of PTX that is read: which kernels and variables a module names.

use std::collections::BTreeMap;

use crate::cuda_error::{CudaError, Result};

/// A module as its text declares it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Ptx {
    pub(crate) entries: Vec<String>,
    /// Variables of the module scope with their first bytes.
    pub(crate) globals: BTreeMap<String, Vec<u8>>,
}

impl Ptx {
    /// Reads the text. What is no PTX is no image for this "GPU".
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let code: String = text
            .lines()
            .map(|line| line.split_once("//").map_or(line, |(code, _)| code))
            .collect::<Vec<_>>()
            .join("\n");
        if !code.trim_start().starts_with(".version") {
            return Err(CudaError::INVALID_IMAGE);
        }
        let mut ptx = Self::default();
        let mut depth = 0_usize;
        // Statements of the module scope end with ';' or begin a body with '{'.
        let mut statement = String::new();
        let mut initialiser = false;
        for char in code.chars() {
            match char {
                '{' if depth == 0 && statement.contains('=') => {
                    initialiser = true;
                    statement.push(' ');
                }
                '}' if initialiser => initialiser = false,
                '{' => {
                    if depth == 0 {
                        ptx.declaration(&statement)?;
                        statement.clear();
                    }
                    depth += 1;
                }
                '}' => depth = depth.checked_sub(1).ok_or(CudaError::INVALID_IMAGE)?,
                ';' if depth == 0 => {
                    ptx.declaration(&statement)?;
                    statement.clear();
                }
                _ if depth == 0 => statement.push(char),
                _ => {}
            }
        }
        if depth == 0 { Ok(ptx) } else { Err(CudaError::INVALID_IMAGE) }
    }

    fn declaration(&mut self, statement: &str) -> Result<()> {
        if let Some((_, rest)) = statement.split_once(".entry") {
            let name = rest.trim_start().split(|c: char| c == '(' || c.is_whitespace()).next();
            self.entries.push(name.unwrap_or_default().to_owned());
        } else if let Some((_, rest)) = statement.split_once(".global") {
            let (name, bytes) = variable(rest).ok_or(CudaError::INVALID_IMAGE)?;
            self.globals.insert(name, bytes);
        }
        Ok(())
    }
}

/// `.align 4 .u32 name[2] = 1, 2`
fn variable(declaration: &str) -> Option<(String, Vec<u8>)> {
    let (left, values) = declaration.split_once('=').unwrap_or((declaration, ""));
    let mut words = left.split_whitespace();
    let mut width = None;
    let mut name = String::new();
    while let Some(word) = words.next() {
        match word {
            ".align" => _ = words.next()?,
            ".u8" | ".s8" | ".b8" => width = Some(1),
            ".u16" | ".s16" | ".b16" => width = Some(2),
            ".u32" | ".s32" | ".b32" => width = Some(4),
            ".u64" | ".s64" | ".b64" => width = Some(8),
            _ => name.push_str(word),
        }
    }
    let width: usize = width?;
    let mut count = 1;
    if let Some((bare, length)) = name.clone().split_once('[') {
        count = length.trim_end_matches(']').parse().ok()?;
        name.truncate(bare.len());
    }
    let mut bytes = Vec::new();
    for value in values.split(',').map(str::trim).filter(|value| !value.is_empty()) {
        let value = match value.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok()?,
            None => value.parse::<i64>().ok()?.cast_unsigned(),
        };
        bytes.extend_from_slice(&value.to_le_bytes()[..width]);
    }
    bytes.resize(width.checked_mul(count)?, 0);
    Some((name, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "// made by hand\n.version 6.0\n.target sm_50\n.address_size 64\n\
        .visible .global .align 4 .u32 counter = 100;\n\
        .global .align 8 .b64 table[3] = {1, -1};\n.global .b8 raw [5];\n\
        .visible .entry increment(\n .param .u64 p\n)\n{ .reg .b32 %r<2>;\n { ret; } }\n\
        .visible .entry spin (.param .u64 ns) { ret; }\n";

    #[test]
    fn finds_kernels_and_variables() {
        let ptx = Ptx::parse(TEXT).unwrap();
        assert_eq!(ptx.entries, ["increment", "spin"]);
        assert_eq!(ptx.globals["counter"], 100_u32.to_le_bytes());
        assert_eq!(ptx.globals["table"][..8], 1_u64.to_le_bytes());
        assert_eq!(ptx.globals["table"][8..16], [0xff; 8]);
        assert_eq!(ptx.globals["table"].len(), 24);
        assert_eq!(ptx.globals["raw"], [0; 5]);
    }

    #[test]
    fn refuses_other_images() {
        assert_eq!(Ptx::parse("\x7fELF"), Err(CudaError::INVALID_IMAGE));
        assert_eq!(Ptx::parse(".version 6.0\n.entry a() {"), Err(CudaError::INVALID_IMAGE));
    }
}
