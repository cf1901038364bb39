//! Decodes base64 that arrives in pieces, in any alphabet, with or without padding.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// Pieces are decoded in blocks of this many characters.
const BLOCK: usize = 32 << 10;

/// The bits after the last byte do not matter: some encoders do not clear them.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::RequireNone),
);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not base64")]
pub(crate) struct NotBase64;

/// A decoder for one text.
#[derive(Debug, Default)]
pub(crate) struct Base64Decoder {
    /// Characters of an incomplete block.
    characters: Vec<u8>,
    padding: u8,
}

impl Base64Decoder {
    /// Decodes a further piece. Passes the bytes to `take`, in blocks.
    pub(crate) fn decode<E: From<NotBase64>>(
        &mut self,
        mut piece: &[u8],
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        while !piece.is_empty() {
            let room = BLOCK.saturating_sub(self.characters.len()).max(1);
            let (first, rest) = piece.split_at(piece.len().min(room));
            piece = rest;
            for &byte in first {
                match byte {
                    b'=' => {
                        self.padding += 1;
                        if self.padding > 2 {
                            return Err(NotBase64.into());
                        }
                    }
                    _ if self.padding > 0 => return Err(NotBase64.into()),
                    b'-' => self.characters.push(b'+'),
                    b'_' => self.characters.push(b'/'),
                    other => self.characters.push(other),
                }
            }
            if self.characters.len() >= BLOCK {
                self.take_block(&mut take)?;
            }
        }
        Ok(())
    }

    /// Decodes the characters that are left.
    pub(crate) fn finish<E: From<NotBase64>>(
        &mut self,
        take: impl FnOnce(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let bytes = LENIENT.decode(&self.characters).map_err(|_| NotBase64)?;
        self.characters.clear();
        take(&bytes)
    }

    fn take_block<E: From<NotBase64>>(
        &mut self,
        take: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let incomplete = self.characters.split_off(self.characters.len() / 4 * 4);
        let block = std::mem::replace(&mut self.characters, incomplete);
        let bytes = LENIENT.decode(&block).map_err(|_| NotBase64)?;
        take(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
    use proptest::prelude::*;

    use super::*;

    fn decode(text: &str, piece: usize) -> Result<Vec<u8>, NotBase64> {
        let (mut decoder, mut bytes) = (Base64Decoder::default(), Vec::new());
        for piece in text.as_bytes().chunks(piece.max(1)) {
            decoder.decode(piece, |block| {
                bytes.extend_from_slice(block);
                Ok::<_, NotBase64>(())
            })?;
        }
        decoder.finish(|block| {
            bytes.extend_from_slice(block);
            Ok::<_, NotBase64>(())
        })?;
        Ok(bytes)
    }

    proptest! {
        #[test]
        fn any_alphabet_in_any_pieces_gives_the_bytes(bytes: Vec<u8>, piece in 1_usize..70) {
            for text in [STANDARD.encode(&bytes), URL_SAFE_NO_PAD.encode(&bytes)] {
                prop_assert_eq!(decode(&text, piece).unwrap(), bytes.clone());
            }
        }
    }

    #[test]
    fn large_texts_are_decoded_in_blocks() {
        let bytes: Vec<u8> = (0..200_000_u32).map(|n| (n % 251) as u8).collect();
        let text = STANDARD.encode(&bytes);
        for piece in [1, 1000, BLOCK, text.len()] {
            assert_eq!(decode(&text, piece).unwrap(), bytes);
        }
    }

    #[test]
    fn other_text_is_an_error() {
        for text in ["a", "a!bc", "ab==cd", "ab===", "ab\ncd", &format!("{}!aa", "A".repeat(BLOCK))] {
            assert_eq!(decode(text, 3), Err(NotBase64), "{text}");
        }
    }
}
