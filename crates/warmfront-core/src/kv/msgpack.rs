//! A reader over `MessagePack` bytes, for KV events only.
//!
//! Hand-written because token ids are most of a frame and must cost a few nanoseconds each. Every length is checked
//! against the bytes that are left before anything is allocated, so memory stays within a small factor of the frame.

use std::hint::select_unpredictable;

use super::wire::WireError;

/// Nesting of values that are skipped or read; real frames use six levels.
const DEPTH_MAX: u32 = 32;

/// Reads values from the front of a byte slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
}

/// Head of the next value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Head<'a> {
    Nil,
    Bool,
    /// An integer of 0 to `u64::MAX`.
    Unsigned(u64),
    /// A negative integer.
    Signed(i64),
    Float(f64),
    /// Raw: a string need not be UTF-8 before it is used as one.
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Array(usize),
    Map(usize),
    Extension,
}

type Result<T> = std::result::Result<T, WireError>;

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(length).ok_or(WireError::Truncated)?;
        self.bytes = rest;
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (taken, rest) = self.bytes.split_first_chunk::<N>().ok_or(WireError::Truncated)?;
        self.bytes = rest;
        Ok(*taken)
    }

    fn length(&mut self, width: u8) -> Result<usize> {
        Ok(match width {
            1 => usize::from(u8::from_be_bytes(self.fixed()?)),
            2 => usize::from(u16::from_be_bytes(self.fixed()?)),
            _ => u32::from_be_bytes(self.fixed()?) as usize,
        })
    }

    /// A count of elements; each takes at least `bytes_each` bytes, so a count beyond what is left is a lie.
    fn count(&self, count: usize, bytes_each: usize) -> Result<usize> {
        if count > self.bytes.len() / bytes_each { Err(WireError::Truncated) } else { Ok(count) }
    }

    /// Reads the head of the next value, and all of it unless it is an array or a map.
    pub(super) fn head(&mut self) -> Result<Head<'a>> {
        let [tag] = self.fixed()?;
        Ok(match tag {
            0x00..=0x7f => Head::Unsigned(u64::from(tag)),
            0x80..=0x8f => Head::Map(self.count(usize::from(tag & 0x0f), 2)?),
            0x90..=0x9f => Head::Array(self.count(usize::from(tag & 0x0f), 1)?),
            0xa0..=0xbf => Head::Str(self.take(usize::from(tag & 0x1f))?),
            0xc0 => Head::Nil,
            0xc1 => return Err(WireError::Unexpected("a reserved byte")),
            0xc2 | 0xc3 => Head::Bool,
            0xc4..=0xc6 => {
                let length = self.length(1 << (tag - 0xc4))?;
                Head::Bin(self.take(length)?)
            }
            0xc7..=0xc9 => {
                let length = self.length(1 << (tag - 0xc7))?;
                self.take(length + 1)?;
                Head::Extension
            }
            0xca => Head::Float(f64::from(f32::from_be_bytes(self.fixed()?))),
            0xcb => Head::Float(f64::from_be_bytes(self.fixed()?)),
            0xcc => Head::Unsigned(u64::from(u8::from_be_bytes(self.fixed()?))),
            0xcd => Head::Unsigned(u64::from(u16::from_be_bytes(self.fixed()?))),
            0xce => Head::Unsigned(u64::from(u32::from_be_bytes(self.fixed()?))),
            0xcf => Head::Unsigned(u64::from_be_bytes(self.fixed()?)),
            0xd0 => integer(i64::from(i8::from_be_bytes(self.fixed()?))),
            0xd1 => integer(i64::from(i16::from_be_bytes(self.fixed()?))),
            0xd2 => integer(i64::from(i32::from_be_bytes(self.fixed()?))),
            0xd3 => integer(i64::from_be_bytes(self.fixed()?)),
            0xd4..=0xd8 => {
                self.take((1 << (tag - 0xd4)) + 1)?;
                Head::Extension
            }
            0xd9..=0xdb => {
                let length = self.length(1 << (tag - 0xd9))?;
                Head::Str(self.take(length)?)
            }
            0xdc | 0xdd => {
                let count = self.length(2 << (tag - 0xdc))?;
                Head::Array(self.count(count, 1)?)
            }
            0xde | 0xdf => {
                let count = self.length(2 << (tag - 0xde))?;
                Head::Map(self.count(count, 2)?)
            }
            0xe0..=0xff => Head::Signed(i64::from(tag.cast_signed())),
        })
    }

    /// Skips one value of any kind.
    pub(super) fn skip(&mut self) -> Result<()> {
        self.skip_at(DEPTH_MAX)
    }

    fn skip_at(&mut self, depth: u32) -> Result<()> {
        let inner = match self.head()? {
            Head::Array(count) => count,
            Head::Map(count) => 2 * count,
            _ => return Ok(()),
        };
        let below = depth.checked_sub(1).ok_or(WireError::TooDeep)?;
        for _ in 0..inner {
            self.skip_at(below)?;
        }
        Ok(())
    }

    /// Skips `count` values.
    pub(super) fn skip_all(&mut self, count: usize) -> Result<()> {
        (0..count).try_for_each(|_| self.skip())
    }

    pub(super) fn array(&mut self, what: &'static str) -> Result<usize> {
        match self.head()? {
            Head::Array(count) => Ok(count),
            _ => Err(WireError::Unexpected(what)),
        }
    }

    /// Appends `count` token ids.
    pub(super) fn tokens(&mut self, count: usize, tokens: &mut Vec<u32>) -> Result<()> {
        let start = tokens.len();
        tokens.resize(start + count, 0);
        let done = self.common_tokens(&mut tokens[start..]);
        for token in &mut tokens[start + done..] {
            let Head::Unsigned(value) = self.head()? else {
                return Err(WireError::Unexpected("token id that is no number"));
            };
            *token = u32::try_from(value).map_err(|_| WireError::Unexpected("token id above 32 bits"))?;
        }
        Ok(())
    }

    /// Reads token ids in their common forms without a branch on the form, since forms alternate at random in real
    /// prompts. Two ids at a time: where the second begins is guessed both ways, so the two lookups overlap. Stops
    /// before the last bytes of a frame and before anything unusual, and says how many ids were read.
    fn common_tokens(&mut self, tokens: &mut [u32]) -> usize {
        let bytes = self.bytes;
        let (mut at, mut done) = (0, 0);
        while let Some(window) = bytes.get(at..).and_then(|rest| rest.first_chunk::<16>())
            && let Some(pair) = tokens.get_mut(done..).and_then(|rest| rest.first_chunk_mut::<2>())
        {
            let first = FORMS[usize::from(window[0])];
            let is_wide = window[0] == 0xce;
            if !is_wide && window[0] != 0xcd {
                // One byte or two: rare in large vocabularies.
                if first.bytes == 0 {
                    break;
                }
                pair[0] = first.cut(word::<0>(window));
                at += usize::from(first.bytes);
                done += 1;
                continue;
            }
            let (behind_short, behind_wide) = (FORMS[usize::from(window[3])], FORMS[usize::from(window[5])]);
            let second_bytes = select_unpredictable(is_wide, behind_wide.bytes, behind_short.bytes);
            if second_bytes == 0 {
                break;
            }
            pair[0] = first.cut(word::<0>(window));
            pair[1] = select_unpredictable(
                is_wide,
                behind_wide.cut(word::<5>(window)),
                behind_short.cut(word::<3>(window)),
            );
            at += select_unpredictable(is_wide, 5, 3) + usize::from(second_bytes);
            done += 2;
        }
        self.bytes = &bytes[at..];
        done
    }
}

/// The eight bytes from `AT` on.
#[inline]
fn word<const AT: usize>(window: &[u8; 16]) -> u64 {
    // An array taken by value: a slice copy of eight bytes becomes a call.
    u64::from_be_bytes(*window[AT..].first_chunk().expect("AT is at most 8"))
}

fn integer(value: i64) -> Head<'static> {
    u64::try_from(value).map_or(Head::Signed(value), Head::Unsigned)
}

/// How a token id of one leading byte is cut out of the eight bytes that start with it.
#[derive(Clone, Copy)]
struct Form {
    /// Length with the leading byte; zero: not a common form.
    bytes: u8,
    shift: u8,
    mask: u32,
}

impl Form {
    #[inline]
    fn cut(self, word: u64) -> u32 {
        (word >> self.shift) as u32 & self.mask
    }
}

static FORMS: [Form; 256] = forms();

const fn forms() -> [Form; 256] {
    let mut forms = [Form { bytes: 0, shift: 0, mask: 0 }; 256];
    let mut tag = 0;
    while tag < 0x80 {
        forms[tag] = Form { bytes: 1, shift: 56, mask: 0x7f };
        tag += 1;
    }
    forms[0xcc] = Form { bytes: 2, shift: 48, mask: 0xff };
    forms[0xcd] = Form { bytes: 3, shift: 40, mask: 0xffff };
    forms[0xce] = Form { bytes: 5, shift: 24, mask: 0xffff_ffff };
    forms
}
