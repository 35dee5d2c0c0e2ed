//! Parameters and outcomes of the suite.

use std::fmt;
use std::time::Duration;

use ringfence_platform::{DomId, GrantStatus};

/// Half of the suite that a domain runs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// Grants pages and takes them back; allocates event channels.
    Lender,
    /// Accesses the granted pages; binds the channels.
    User,
}

impl Role {
    /// Returns the name for command lines and reports.
    pub fn name(self) -> &'static str {
        match self {
            Role::Lender => "lender",
            Role::User => "user",
        }
    }

    /// Returns the role of the other domain.
    #[must_use]
    pub fn other(self) -> Role {
        match self {
            Role::Lender => Role::User,
            Role::User => Role::Lender,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Outcome of a case, the same in both domains.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    Passed,
    /// Failed check, with its message.
    Failed(String),
    /// Case that was not checked, with the reason.
    Skipped(String),
}

/// Name and outcome of a case of the suite.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaseReport {
    pub name: &'static str,
    pub outcome: Outcome,
}

impl fmt::Display for CaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.outcome {
            Outcome::Passed => write!(f, "passed   {}", self.name),
            Outcome::Failed(why) => write!(f, "FAILED   {}: {why}", self.name),
            Outcome::Skipped(why) => write!(f, "skipped  {}: {why}", self.name),
        }
    }
}

/// Numbers of cases by outcome.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Summary {
    pub passed: usize,
    pub failed: usize,
    pub skipped: usize,
}

impl Summary {
    pub(super) fn count(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Passed => self.passed += 1,
            Outcome::Failed(_) => self.failed += 1,
            Outcome::Skipped(_) => self.skipped += 1,
        }
    }
}

/// Reasons for a refusal, each with the statuses that a platform may return.
///
/// Xen finds most of these in one test of the entry's first word, and returns `general_error`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// Reference that is not issued, or is reserved.
    NotIssued,
    /// Page that was granted to another domain.
    OtherDomain,
    /// Write access to a page that was granted for reading.
    ReadOnly,
    /// Mapping beyond the platform's limit.
    NoRoom,
}

impl Refused {
    /// Returns the statuses that are accepted.
    pub fn statuses(self) -> &'static [GrantStatus] {
        match self {
            Refused::NotIssued => &[GrantStatus::BadGref, GrantStatus::GeneralError],
            Refused::OtherDomain => {
                &[GrantStatus::PermissionDenied, GrantStatus::BadGref, GrantStatus::GeneralError]
            }
            Refused::ReadOnly => &[GrantStatus::PermissionDenied, GrantStatus::GeneralError],
            Refused::NoRoom => &[GrantStatus::NoSpace, GrantStatus::NoDeviceSpace],
        }
    }
}

/// One half of the suite, for one domain.
#[derive(Clone, Copy, Debug)]
pub struct Suite {
    pub role: Role,
    /// Domain that runs the other half.
    pub peer: DomId,
    /// Third domain, which both halves must not reach. It takes no part, so on Xen any other number
    /// is suitable.
    pub third: Option<DomId>,
    /// Maximum time for a step of the other half, and for its start.
    pub patience: Duration,
}
