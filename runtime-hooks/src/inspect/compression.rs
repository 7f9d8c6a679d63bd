//! The compressions of Podman's archives, told by their first bytes.

use std::io::{self, BufRead, Read};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use serde::Serialize;

/// How an archive is compressed. The names are Podman's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compression {
    /// Not at all.
    None,
    /// gzip.
    Gzip,
    /// Zstandard, Podman's default.
    Zstd,
}

impl Compression {
    /// The name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        }
    }

    /// By the first bytes of a file; the name of a compression that is not read is the error.
    pub(super) fn of(first: &[u8]) -> Result<Self, &'static str> {
        match first {
            [0x1f, 0x8b, ..] => Ok(Self::Gzip),
            // The second is a skippable frame, with which one may begin.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Ok(Self::Zstd),
            [b'B', b'Z', b'h', ..] => Err("bzip2"),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Err("xz"),
            _ => Ok(Self::None),
        }
    }
}

/// What is in a file of gzip.
pub(super) fn gzip<R: BufRead>(file: R) -> impl Read {
    MultiGzDecoder::new(file)
}

/// What is in a file of Zstandard: frames one after the other, with their checksums compared. A
/// frame that wants a window of more than 100 MB is refused, so memory is bounded.
pub(super) struct Zstd<R> {
    file: R,
    decoder: FrameDecoder,
}

impl<R: BufRead> Zstd<R> {
    pub(super) fn new(file: R) -> Self {
        Self { file, decoder: FrameDecoder::new() }
    }

    /// The next frame; false if there is none.
    fn begin(&mut self) -> io::Result<bool> {
        loop {
            if self.file.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.reset(&mut self.file) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped = io::copy(&mut self.file.by_ref().take(length), &mut io::sink())?;
                    if skipped < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(self.bad(&error)),
            }
        }
    }

    fn end(&self) -> io::Result<()> {
        let noted = self.decoder.get_checksum_from_data();
        if noted.is_some() && noted != self.decoder.get_calculated_checksum() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a checksum is wrong"));
        }
        Ok(())
    }

    /// Nothing is left of a file that is cut short.
    fn bad(&mut self, error: &FrameDecoderError) -> io::Error {
        let kind = match self.file.fill_buf() {
            Ok([]) => io::ErrorKind::UnexpectedEof,
            Ok(_) => io::ErrorKind::InvalidData,
            Err(error) => return error,
        };
        io::Error::new(kind, error.to_string())
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.decoder.can_collect() == 0 {
            if self.decoder.is_finished() {
                self.end()?;
                if !self.begin()? {
                    return Ok(0);
                }
            }
            let decoded =
                self.decoder.decode_blocks(&mut self.file, BlockDecodingStrategy::UptoBlocks(1));
            decoded.map_err(|error| self.bad(&error))?;
        }
        self.decoder.read(buffer)
    }
}
