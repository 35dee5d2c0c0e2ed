//! Macro for enums whose numbers come from a peer.

/// Declares an enum that covers every value of an integer: defined values by name, the others as
/// `Unknown(n)`. `from_raw` and `to_raw` are total and inverse to each other. So no number from the
/// wire is lost or refused by accident.
macro_rules! enum_with_unknown {
    (
        $(#[$enum_doc:meta])*
        pub enum $name:ident($raw:ty) {
            $($(#[$doc:meta])* $variant:ident = $value:literal,)*
        }
    ) => {
        $(#[$enum_doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum $name {
            $($(#[$doc])* $variant,)*
            /// Number that the interface does not define.
            Unknown($raw),
        }

        impl $name {
            /// All defined values, in the order of their numbers.
            pub const DEFINED: &'static [$name] = &[$($name::$variant,)*];

            /// Converts a number of the interface; never fails.
            #[inline]
            pub fn from_raw(raw: $raw) -> $name {
                match raw {
                    $($value => $name::$variant,)*
                    other => $name::Unknown(other),
                }
            }

            /// Returns the number that the header of the interface gives this value.
            #[inline]
            pub fn to_raw(self) -> $raw {
                match self {
                    $($name::$variant => $value,)*
                    $name::Unknown(other) => other,
                }
            }
        }
    };
}
pub(crate) use enum_with_unknown;
