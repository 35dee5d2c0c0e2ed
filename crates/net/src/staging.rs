//! Choice of the pages that a frontend stages for packets that it sends.

/// Use of staged pages by a frontend that sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TxStaging {
    /// No staged pages: each slot has a page of its own.
    #[default]
    Off,
    /// All pages are staged. Packets of at most 256 bytes share few pages, the others have their own pages.
    Full,
    /// Only the header pages are staged. The first 256 bytes of each packet go there. The backend copies or
    /// maps the pages with the rest.
    Heads,
}

impl TxStaging {
    /// Modes that a user can select.
    pub const CHOICES: [TxStaging; 2] = [TxStaging::Full, TxStaging::Heads];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            TxStaging::Off => "off",
            TxStaging::Full => "full",
            TxStaging::Heads => "header",
        }
    }

    /// Returns a description of one line for users.
    pub fn meaning(self) -> &'static str {
        match self {
            TxStaging::Off => "no page stays mapped",
            TxStaging::Full => "all pages of the rings stay mapped",
            TxStaging::Heads => {
                "of what is sent, 16 pages a ring for the first 256 bytes of each packet"
            }
        }
    }
}

impl core::fmt::Display for TxStaging {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

/// Word that is not the name of a staging mode.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no way of staging; there are full and header")]
pub struct UnknownStaging(String);

impl core::str::FromStr for TxStaging {
    type Err = UnknownStaging;

    fn from_str(word: &str) -> Result<TxStaging, UnknownStaging> {
        let all = [TxStaging::Off, TxStaging::Full, TxStaging::Heads];
        let found = all.into_iter().find(|staging| staging.name() == word);
        found.ok_or_else(|| UnknownStaging(word.chars().take(32).collect()))
    }
}
