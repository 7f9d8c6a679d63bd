//! Numbers and tables for people.

use std::fmt::Write as _;
use std::time::Duration;

use bytesize::ByteSize;

/// `8.0 GiB`.
pub(super) fn bytes(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

/// `1.4 s`, `230 ms`.
pub(super) fn seconds(time: Duration) -> String {
    if time < Duration::from_secs(1) {
        format!("{} ms", time.as_millis())
    } else {
        format!("{:.1} s", time.as_secs_f64())
    }
}

/// Columns of text, each as wide as its widest cell. The first row is the heading.
pub(super) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            // Writing to a String does not fail.
            let _ = write!(line, "{cell:<width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        let text = table(&[row(["ID", "STATE"]), row(["longer", "é"]), row(["x", ""])]);
        assert_eq!(text, "ID      STATE\nlonger  é\nx\n");
        assert_eq!(table(&[]), "");
    }

    #[test]
    fn numbers_have_units() {
        assert_eq!(bytes(8 << 30), "8.0 GiB");
        assert_eq!(seconds(Duration::from_millis(999)), "999 ms");
        assert_eq!(seconds(Duration::from_millis(1420)), "1.4 s");
    }
}
