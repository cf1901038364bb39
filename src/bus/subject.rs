//! Every subject and token the bridge uses.
